"""Tiny ONNX models, written by the onnx package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Dims = Sequence[int | str] | None


def value(name: str, kind: int, dims: Dims) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, dims)


def graph(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    weights: Sequence[onnx.TensorProto] = (),
    *,
    opset: int = 17,
    ir: int = 8,
) -> onnx.ModelProto:
    made = helper.make_graph(nodes, "graph", inputs, outputs, list(weights))
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir)


def save(model: onnx.ModelProto, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.SerializeToString())
    return path


def weight(name: str, array: Any) -> onnx.TensorProto:
    return numpy_helper.from_array(np.asarray(array), name)


def identity(kind: int = TensorProto.FLOAT, dims: Dims = ("N", 3)) -> onnx.ModelProto:
    return graph([helper.make_node("Identity", ["x"], ["y"])], [value("x", kind, dims)], [value("y", kind, dims)])


def linear(size_in: int = 3, size_out: int = 4, seed: int = 0) -> onnx.ModelProto:
    """y = x·w (FP32), label = argmax(y) (INT64)."""
    drawn = np.random.default_rng(seed).standard_normal((size_in, size_out)).astype(np.float32)
    return graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["y"], name="/head/MatMul"),
            helper.make_node("ArgMax", ["y"], ["label"], axis=1, keepdims=0),
        ],
        [value("x", TensorProto.FLOAT, ["N", size_in])],
        [value("y", TensorProto.FLOAT, ["N", size_out]), value("label", TensorProto.INT64, ["N"])],
        [weight("w", drawn)],
    )


def reshape_each_row() -> onnx.ModelProto:
    """A model that fails inside its graph where a value of `x` is not 3: it reshapes zeros of [value] to [3]."""
    return graph(
        [
            helper.make_node("ReduceMax", ["x"], ["most"], keepdims=0),
            helper.make_node("Reshape", ["most", "one"], ["shape"]),
            helper.make_node("ConstantOfShape", ["shape"], ["zeros"]),
            helper.make_node("Reshape", ["zeros", "three"], ["checked"], name="/inner/Reshape"),
            helper.make_node("ReduceSum", ["checked"], ["sum"], keepdims=0),
            helper.make_node("Cast", ["sum"], ["whole"], to=TensorProto.INT64),
            helper.make_node("Add", ["x", "whole"], ["y"]),
        ],
        [value("x", TensorProto.INT64, ["N"])],
        [value("y", TensorProto.INT64, ["N"])],
        [weight("one", np.array([1], np.int64)), weight("three", np.array([3], np.int64))],
    )


def huge() -> onnx.ModelProto:
    """A model that makes as many floats as `x` says."""
    return graph(
        [helper.make_node("ConstantOfShape", ["x"], ["y"], name="/inner/huge")],
        [value("x", TensorProto.INT64, ["N"])],
        [value("y", TensorProto.FLOAT, None)],
    )


def softmax_over_rows() -> onnx.ModelProto:
    """A model whose rows depend on each other."""
    return graph(
        [helper.make_node("Softmax", ["x"], ["y"], axis=0)],
        [value("x", TensorProto.FLOAT, ["N", 2])],
        [value("y", TensorProto.FLOAT, ["N", 2])],
    )


def batch_of_one_built_in() -> onnx.ModelProto:
    """A model that declares any number of rows and reshapes to one, in a way that no shape inference sees."""
    return graph(
        [
            helper.make_node("ReduceMax", ["x"], ["most"], keepdims=0),
            helper.make_node("Mul", ["most", "nothing"], ["zero"]),
            helper.make_node("Cast", ["zero"], ["whole"], to=TensorProto.INT64),
            helper.make_node("Add", ["shape", "whole"], ["wanted"]),
            helper.make_node("Reshape", ["x", "wanted"], ["y"]),
        ],
        [value("x", TensorProto.FLOAT, ["N", 3])],
        [value("y", TensorProto.FLOAT, ["N", 3])],
        [weight("shape", np.array([1, 3], np.int64)), weight("nothing", np.array(0, np.float32))],
    )


def label_declared_as_one() -> onnx.ModelProto:
    """A model that returns one label a row and declares [1], as converted tree ensembles do."""
    return graph(
        [
            helper.make_node("ReduceSum", ["x", "axes"], ["sum"], keepdims=0),
            helper.make_node("Cast", ["sum"], ["label"], to=TensorProto.INT64),
        ],
        [value("x", TensorProto.FLOAT, ["N", 3])],
        [value("label", TensorProto.INT64, [1])],
        [weight("axes", np.array([1], np.int64))],
    )


def two_inputs_of_one_length() -> onnx.ModelProto:
    """ids + mask, both [N, seq]."""
    return graph(
        [helper.make_node("Add", ["ids", "mask"], ["y"])],
        [value("ids", TensorProto.INT64, ["N", "seq"]), value("mask", TensorProto.INT64, ["N", "seq"])],
        [value("y", TensorProto.INT64, ["N", "seq"])],
    )


def with_data_file(folder: Path, name: str = "model.onnx", data: str = "weights.bin") -> Path:
    """The linear model with its weights in a file beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(linear(), folder / name, save_as_external_data=True, location=data, size_threshold=0)
    return folder / name
