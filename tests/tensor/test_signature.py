from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.errors import (
    CallerError,
    DtypeMismatch,
    InvalidRequest,
    MissingInput,
    ShapeMismatch,
    UnknownInput,
    UnknownOutput,
)
from headrace.tensor import Datatype, Signature, Tensor, TensorSpec

X = TensorSpec("x", Datatype.FP32, (-1, 3))
MASK = TensorSpec("mask", Datatype.BOOL, (-1,))
Y = TensorSpec("y", Datatype.FP32, (-1, 3))
SIGNATURE = Signature((X,), (Y, TensorSpec("label", Datatype.BYTES, (-1,))))
PAIR = Signature((X, MASK), (Y,))


def x(*shape: int, dtype: Any = np.float32) -> Tensor:
    return Tensor.of(np.zeros(shape, dtype=dtype))


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_a_dynamic_dimension_takes_any_length(rows: int) -> None:
    SIGNATURE.check({"x": x(rows, 3)}, ["label", "y"])


@pytest.mark.parametrize(
    ("inputs", "outputs", "error", "details"),
    [
        ({}, None, MissingInput, {"input": "x", "expected": ["x"], "actual": []}),
        (
            {"x": x(1, 3), "z": x(1, 3)},
            None,
            UnknownInput,
            {"input": "z", "expected": ["x"], "actual": "z"},
        ),
        ({"z": x(1, 3)}, None, UnknownInput, {"input": "z", "expected": ["x"], "actual": "z"}),
        (
            {"x": x(1, 3, dtype=np.float64)},
            None,
            DtypeMismatch,
            {"input": "x", "expected": "FP32", "actual": "FP64"},
        ),
        ({"x": x(1, 4)}, None, ShapeMismatch, {"input": "x", "expected": [-1, 3], "actual": [1, 4]}),
        ({"x": x(3)}, None, ShapeMismatch, {"input": "x", "expected": [-1, 3], "actual": [3]}),
        ({"x": x(1, 1, 3)}, None, ShapeMismatch, {"input": "x", "expected": [-1, 3], "actual": [1, 1, 3]}),
        (
            {"x": x(1, 3)},
            ["y", "typo"],
            UnknownOutput,
            {"output": "typo", "expected": ["y", "label"], "actual": "typo"},
        ),
    ],
)
def test_each_misfit_has_its_error_and_lists_what_is_legal(
    inputs: dict[str, Tensor], outputs: list[str] | None, error: type[CallerError], details: dict[str, Any]
) -> None:
    with pytest.raises(error) as caught:
        SIGNATURE.check(inputs, outputs)
    assert type(caught.value) is error
    assert caught.value.details == details
    assert str(details["actual"]) in caught.value.message or error is MissingInput


def test_the_inputs_of_a_batchable_version_have_equally_many_rows() -> None:
    PAIR.check({"x": x(2, 3), "mask": Tensor.of(np.zeros(2, bool))})
    with pytest.raises(ShapeMismatch) as caught:
        PAIR.check({"x": x(2, 3), "mask": Tensor.of(np.zeros(3, bool))})
    assert caught.value.details == {"input": "mask", "expected": [2], "actual": [3]}


def test_the_order_of_inputs_is_free() -> None:
    PAIR.check({"mask": Tensor.of(np.zeros(2, bool)), "x": x(2, 3)})


def test_inputs_of_a_version_that_is_not_batchable_may_differ_in_length() -> None:
    signature = Signature((X, MASK), (TensorSpec("total", Datatype.FP32, ()),))
    assert not signature.batchable
    signature.check({"x": x(2, 3), "mask": Tensor.of(np.zeros(3, bool))})


@pytest.mark.parametrize(
    ("inputs", "outputs", "batchable"),
    [
        (((-1, 3),), ((-1,),), True),
        (((-1,), (-1, 2)), ((-1,), (-1, 4)), True),
        (((1, 3),), ((-1,),), False),
        (((-1, 3),), ((1,),), False),
        (((-1, 3), ()), ((-1,),), False),
        ((), (), False),
    ],
)
def test_batchable_means_that_every_first_dimension_is_free(
    inputs: tuple[tuple[int, ...], ...], outputs: tuple[tuple[int, ...], ...], batchable: bool
) -> None:
    signature = Signature(
        tuple(TensorSpec(f"i{n}", Datatype.FP32, shape) for n, shape in enumerate(inputs)),
        tuple(TensorSpec(f"o{n}", Datatype.FP32, shape) for n, shape in enumerate(outputs)),
    )
    assert signature.batchable is batchable


def test_a_signature_survives_json_and_keeps_its_digest() -> None:
    again = Signature.from_json(PAIR.to_json())
    assert again == PAIR
    assert again.digest == PAIR.digest
    # Fixed for good: it is stored in messages and cards.
    assert SIGNATURE.digest == "7a914977b2eb3e41b1a02c9fff65320d"


def test_every_part_of_a_signature_changes_its_digest() -> None:
    others = [
        Signature((X,), (Y,)),
        Signature((Y,), (X,)),
        Signature((TensorSpec("x", Datatype.FP64, (-1, 3)),), (Y,)),
        Signature((TensorSpec("x", Datatype.FP32, (-1, 4)),), (Y,)),
        Signature((TensorSpec("x", Datatype.FP32, (-1,)),), (Y,)),
        Signature((X, MASK), (Y,)),
        Signature((MASK, X), (Y,)),
    ]
    assert len({signature.digest for signature in others}) == len(others)


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"inputs": [], "outputs": [{"name": "y"}]},
        {"inputs": [{"name": "x", "datatype": "FP32", "shape": [-2]}], "outputs": []},
        {"inputs": [{"name": "x", "datatype": "FP32", "shape": ["a"]}], "outputs": []},
        {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1]}] * 2, "outputs": []},
    ],
)
def test_a_broken_signature_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="not a signature"):
        Signature.from_json(value)


def test_a_signature_with_an_unknown_datatype_is_refused() -> None:
    with pytest.raises(DtypeMismatch):
        Signature.from_json({"inputs": [{"name": "x", "datatype": "FP8", "shape": [1]}], "outputs": []})
