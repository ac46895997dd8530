"""The onnx runtime, on onnxruntime's CPU provider or on its CUDA provider.

onnxruntime falls back to the CPU without an error where CUDA does not come up; what it runs on is looked at afterwards.

Weights are read into memory, never mapped: a file that is overwritten in place is then all old or all new. One
session serves any number of threads. Its own pool has `threads` threads that sleep while there is nothing to do:
spinning ones would burn the quota that the event loop lives on (measured: four times the CPU for no latency).
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from headrace.errors import HeadraceError, InvalidValue, ModelFailed, ModelLoadFailed, ShapeMismatch
from headrace.runtimes.base import Artifact, Runtime, load_failed, no_device, out_of_memory
from headrace.tensor import Datatype, Signature, Tensor, TensorSpec

__all__ = ["OnnxRuntime"]

_DATATYPES = {
    "tensor(bool)": Datatype.BOOL,
    "tensor(uint8)": Datatype.UINT8,
    "tensor(uint16)": Datatype.UINT16,
    "tensor(uint32)": Datatype.UINT32,
    "tensor(uint64)": Datatype.UINT64,
    "tensor(int8)": Datatype.INT8,
    "tensor(int16)": Datatype.INT16,
    "tensor(int32)": Datatype.INT32,
    "tensor(int64)": Datatype.INT64,
    "tensor(float16)": Datatype.FP16,
    "tensor(float)": Datatype.FP32,
    "tensor(double)": Datatype.FP64,
    "tensor(bfloat16)": Datatype.BF16,
    "tensor(string)": Datatype.BYTES,
}
#: onnx.TensorProto.BFLOAT16; numpy has no such type, so these tensors cross the border as their raw 16 bits.
_BFLOAT16 = 16
Array = npt.NDArray[Any]

_CUDA = "CUDAExecutionProvider"

#: The `location` entry of a tensor whose data lies in another file (StringStringEntryProto, key then value).
_LOCATION = re.compile(rb"\x0a\x08location\x12([\x01-\x7f])")
_SOURCE = re.compile(r"/onnxruntime_src/\S+:\d+ .*?\)(?: const)?(?: \[with [^\]]*\])? ?")
_PREFIX = re.compile(r"\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : ")
_NODE = re.compile(r"while running (\w+) node\. Name:'([^']*)' Status Message: ?")
_MEMORY = re.compile(r"allocate memory for requested buffer of size (\d+)")


class OnnxRuntime(Runtime):
    """A session of onnxruntime."""

    platform = "onnx_onnxv1"
    concurrent = True
    steady = True

    def __init__(self, session: Any, signature: Signature, symbols: Mapping[str, Sequence[object]]) -> None:
        self.signature = signature
        self._session = session
        self._symbols = symbols
        self._datatypes = {spec.name: spec.datatype for spec in (*signature.inputs, *signature.outputs)}
        self._has_bf16 = Datatype.BF16 in self._datatypes.values()
        self._texts = [spec.name for spec in signature.inputs if spec.datatype is Datatype.BYTES]
        self._has_text = Datatype.BYTES in self._datatypes.values()
        self._pid = os.getpid()

    @classmethod
    def load(cls, artifact: Artifact, *, threads: int) -> OnnxRuntime:
        """Load a file. Raises ModelLoadFailed naming the file (relative), the reason and what was expected."""
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # stderr is ours; what matters comes as an exception
        options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            content = _read(artifact)
            names, parts = _companions(artifact, content)
            if names:
                options.add_external_initializers_from_files_in_memory(names, parts, [len(p) for p in parts])
            session, device = _session(artifact, content, options)
        except HeadraceError:
            raise
        except MemoryError as error:
            raise _load_failed(artifact, "there is not enough memory to load it") from error
        except Exception as error:  # its exceptions have no common base
            raise _load_failed(artifact, _why(error)) from error
        nodes = session.get_inputs()
        signature = Signature(
            tuple(_spec(artifact, "input", node) for node in nodes),
            tuple(_spec(artifact, "output", node) for node in session.get_outputs()),
        )
        datatypes = {spec.datatype for spec in (*signature.inputs, *signature.outputs)}
        if {Datatype.BF16, Datatype.BYTES} <= datatypes:
            raise _load_failed(artifact, "text and BF16 in one model cannot pass through onnxruntime's Python API")
        runtime = cls(session, signature, {node.name: node.shape for node in nodes})
        runtime.device = device
        return runtime

    def run(self, inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> dict[str, Tensor]:
        """Compute the named outputs. Raises ModelFailed or OutOfMemory; InvalidValue for text that is not UTF-8."""
        if self._session is None:
            raise ModelFailed("the model is closed")
        if self._pid != os.getpid():
            # The threads of its pool did not come along; onnxruntime would wait for them for ever.
            raise ModelFailed("the model was loaded before a fork; load it in the process that runs it")
        try:
            if self._has_bf16:
                return self._run_bf16(inputs, outputs)
            feed = {name: tensor.array for name, tensor in inputs.items()}
            for name in self._texts:
                feed[name] = _as_text(name, feed[name])
            answers = self._session.run(outputs, feed)
            known = self._datatypes
            if self._has_text:
                return {n: Tensor.of(a, known[n]) for n, a in zip(outputs, answers, strict=True)}
            return {n: Tensor(known[n], np.asarray(a)) for n, a in zip(outputs, answers, strict=True)}
        except HeadraceError:
            raise
        except Exception as error:
            raise self._failed(error, inputs) from error

    def close(self) -> None:
        """Free memory and threads. Idempotent."""
        self._session = None

    def _run_bf16(self, inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> dict[str, Tensor]:
        """Run through values of onnxruntime's own: numpy arrays cannot say BF16 to it."""
        make = onnxruntime.OrtValue
        feed: dict[str, Any] = {}
        for name, tensor in inputs.items():
            if tensor.datatype is Datatype.BF16:
                bits = tensor.array.view(np.uint16)
                feed[name] = make.ortvalue_from_numpy_with_onnx_type(bits, _BFLOAT16)
            else:
                feed[name] = make.ortvalue_from_numpy(tensor.array)
        answers = self._session.run_with_ort_values(outputs, feed)
        return {n: _tensor(self._datatypes[n], value) for n, value in zip(outputs, answers, strict=True)}

    def _failed(self, error: Exception, inputs: Mapping[str, Tensor]) -> HeadraceError:
        text = str(error)
        node = _NODE.search(text)
        memory = _MEMORY.search(text)
        if memory or isinstance(error, MemoryError) or "bad_alloc" in text or "bad allocation" in text:
            return out_of_memory(int(memory[1]) if memory else None, (node[2] or node[1]) if node else None)
        return self._contradiction(inputs) or ModelFailed(f"the model failed: {_why(error)}")

    def _contradiction(self, inputs: Mapping[str, Tensor]) -> ShapeMismatch | None:
        """Find two inputs that share a symbolic dimension and differ in it.

        Looked at only after a failure: exporters also give one name to dimensions that may differ.
        """
        seen: dict[object, tuple[str, int]] = {}
        for name, tensor in inputs.items():
            for symbol, size in zip(self._symbols[name], tensor.shape, strict=True):
                first, expected = seen.setdefault(symbol, (name, size))
                if isinstance(symbol, str) and size != expected:
                    return ShapeMismatch(
                        f"input {name!r}: dimension {symbol!r} is {size}, but {expected} in input {first!r}",
                        details={"input": name, "expected": {symbol: expected}, "actual": list(tensor.shape)},
                    )
        return None


def _session(artifact: Artifact, content: bytes, options: Any) -> tuple[Any, str]:
    """Return a session and the device that it is on; on a named device or not at all."""
    asked = artifact.device
    there = _CUDA in onnxruntime.get_available_providers()
    if asked.startswith("cuda") and not there:
        hint = "this onnxruntime is built without CUDA; run: pip install onnxruntime-gpu"
        raise no_device(artifact, ["cpu"], hint)
    number = asked.partition(":")[2] or "0"
    on_cpu: list[Any] = ["CPUExecutionProvider"]
    on_cuda = [(_CUDA, {"device_id": number}), *on_cpu]
    if not there or asked == "cpu":
        return onnxruntime.InferenceSession(content, options, providers=on_cpu), "cpu"
    try:
        # Its own fallback would print to stdout, and run on the CPU whatever was asked for.
        session = onnxruntime.InferenceSession(content, options, providers=on_cuda, enable_fallback=0)
        if session.get_providers()[0] == _CUDA:
            return session, f"cuda:{number}"
        why = "onnxruntime fell back to the CPU; are CUDA and cuDNN installed?"
    except RuntimeError as error:
        why = _why(error)
        session = onnxruntime.InferenceSession(content, options, providers=on_cpu)
    if asked != "auto":
        raise no_device(artifact, ["cpu"], why)
    return session, "cpu"


def _read(artifact: Artifact) -> bytes:
    assert artifact.path is not None
    try:
        content = artifact.path.read_bytes()
    except FileNotFoundError as error:
        raise _load_failed(artifact, "there is no such file") from error
    except IsADirectoryError as error:
        raise _load_failed(artifact, "it is a folder, not a file") from error
    except OSError as error:
        raise _load_failed(artifact, f"it cannot be read: {error.strerror}") from error
    if not content:
        raise _load_failed(artifact, "the file is empty")
    return content


def _companions(artifact: Artifact, content: bytes) -> tuple[list[str], list[bytes]]:
    """Read the files beside the model that hold its larger tensors.

    onnxruntime would map them; read, they cannot change under a running model. The names come out of the model,
    so one that leads out of its folder is refused.
    """
    assert artifact.path is not None
    found: dict[str, bytes] = {}
    for match in _LOCATION.finditer(content):
        name = content[match.end() : match.end() + match[1][0]].decode(errors="replace")
        if name in found:
            continue
        inside = PurePosixPath(name)
        if inside.is_absolute() or ".." in inside.parts:
            raise _load_failed(artifact, "it names a data file outside its folder")
        file = artifact.path.parent / inside
        try:
            found[name] = file.read_bytes()
        except OSError as error:
            beside = Artifact(artifact.name, artifact.version, "onnx", file, root=artifact.root)
            raise _load_failed(beside, "a data file of the model is missing", [inside.name]) from error
    return list(found), list(found.values())


def _spec(artifact: Artifact, kind: str, node: Any) -> TensorSpec:
    datatype = _DATATYPES.get(node.type)
    if datatype is None:
        hint = "; export with options={'zipmap': False}" if node.type.startswith("seq(map(") else ""
        raise _load_failed(artifact, f"{kind} {node.name!r} is {node.type}, which is not a tensor we serve{hint}")
    # A symbolic or missing dimension is any length.
    shape = tuple(size if isinstance(size, int) and size >= 0 else -1 for size in node.shape)
    return TensorSpec(node.name, datatype, shape)


def _as_text(name: str, array: Array) -> Array:
    """Return the str objects that onnxruntime takes; given bytes, it would silently take their repr."""
    held = np.empty(array.size, dtype=object)
    try:
        held[:] = [item.decode() for item in array.ravel().tolist()]
    except UnicodeDecodeError as error:
        raise InvalidValue(
            f"input {name!r}: the model takes text, and this is not UTF-8",
            details={"input": name, "expected": "UTF-8 text", "actual": "other bytes"},
        ) from error
    return held.reshape(array.shape)


def _tensor(datatype: Datatype, value: Any) -> Tensor:
    if datatype is not Datatype.BF16:
        return Tensor.of(value.numpy(), datatype)
    shape = value.shape()
    size = 2 * int(np.prod(shape, dtype=np.int64))
    # Copied: the memory belongs to the value, which does not outlive this call.
    bits = ctypes.string_at(value.data_ptr(), size) if size else b""
    return Tensor(datatype, np.frombuffer(bits, dtype=datatype.numpy).reshape(shape))


def _why(error: Exception) -> str:
    """Return onnxruntime's text without the places of its sources and without ours."""
    if type(error).__name__ == "InvalidProtobuf":
        return "it is not an ONNX model, or it is cut short"
    text = _PREFIX.sub("", str(error))
    text = _SOURCE.sub("", text)
    text = _NODE.sub(lambda m: f"in {m[1]} node {m[2]!r}: ", text).replace("Non-zero status code returned ", "")
    text = text.replace(str(Path.cwd()), ".")
    return " ".join(text.split())[:300] or type(error).__name__


def _load_failed(artifact: Artifact, reason: str, expected: Sequence[str] = ("model.onnx",)) -> ModelLoadFailed:
    return load_failed(artifact, reason, expected)
