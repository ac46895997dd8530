"""The torchscript runtime: `torch.jit.load`, frozen, without gradients.

A TorchScript file says how many tensors it takes, but neither datatypes nor shapes: a card beside it does, or one
example input that is run at load. `torch.jit.load` reads weights and code with an unpickler of its own that makes
tensors and TorchScript objects and nothing else; files of any other kind are refused before (`torchscript_files`).
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch

from headrace.clock import SystemClock
from headrace.errors import HeadraceError, ModelFailed, ModelLoadFailed
from headrace.runtimes.base import Artifact, Runtime, load_failed, no_device, out_of_memory
from headrace.runtimes.torchscript_files import EXPECTED
from headrace.runtimes.torchscript_graph import Calling, calling, faults, memory_wanted, mutates, quiet, steady, why
from headrace.tensor import Datatype, Signature, Tensor, TensorSpec

__all__ = ["TorchscriptRuntime"]

_DATATYPES = {
    torch.bool: Datatype.BOOL,
    torch.uint8: Datatype.UINT8,
    torch.uint16: Datatype.UINT16,
    torch.uint32: Datatype.UINT32,
    torch.uint64: Datatype.UINT64,
    torch.int8: Datatype.INT8,
    torch.int16: Datatype.INT16,
    torch.int32: Datatype.INT32,
    torch.int64: Datatype.INT64,
    torch.float16: Datatype.FP16,
    torch.float32: Datatype.FP32,
    torch.float64: Datatype.FP64,
    torch.bfloat16: Datatype.BF16,
}
#: Runs that are timed of each form, after as many that are not: the first ones still compile.
_TIMED_RUNS = 5
#: A form that is tried must be faster by this much, and a model slower than this is not measured.
_FASTER = 0.9
_RUN_S_MAX = 0.5
_TOLERANCE = 1e-3


class TorchscriptRuntime(Runtime):
    """A TorchScript module."""

    platform = "pytorch_torchscript"

    def __init__(self, module: Any, signature: Signature, call: Calling, *, device: str, threads: int) -> None:
        self.signature = signature
        self.device = device
        self._module = module
        self._call = call
        self._threads = threads
        self._datatypes = {spec.name: spec.datatype for spec in signature.outputs}
        self._ranks = {spec.name: len(spec.shape) for spec in signature.outputs}
        #: Whether it may write into its inputs, which are then handed over as copies.
        self._copies = True
        self._pid = os.getpid()

    @classmethod
    def load(cls, artifact: Artifact, *, threads: int) -> TorchscriptRuntime:
        """Load a file. Raises ModelLoadFailed naming the file (relative), the reason and what was expected."""
        device = _device(artifact)
        assert artifact.path is not None
        torch.set_num_threads(threads)
        try:
            # Read first: a file that is overwritten in place is then all old or all new, and no path gets into errors.
            content = io.BytesIO(artifact.path.read_bytes())
            with quiet():
                loaded = torch.jit.load(content, map_location=device).eval()
                frozen = loaded if artifact.given.stateful else torch.jit.freeze(loaded)
        except MemoryError as error:
            raise load_failed(artifact, "there is not enough memory to load it", EXPECTED) from error
        except Exception as error:
            raise load_failed(artifact, why(error), EXPECTED) from error
        for fault in faults(frozen):
            raise load_failed(artifact, fault, EXPECTED)
        given = _named_inputs(artifact)
        call = calling(artifact, frozen, given)
        stateful = bool(mutates(frozen)) or _changed_by_a_run(artifact, loaded, call)
        if stateful:
            _allow_state(artifact)
        runtime = cls(frozen, Signature((), ()), call, device=device, threads=threads)
        runtime.concurrent = not stateful
        runtime.steady = steady(frozen)
        runtime._sign(artifact)
        if stateful and runtime.signature.batchable:
            reason = "it keeps state, so rows of several callers cannot run together: fix its first dimensions"
            raise load_failed(artifact, reason, ["a card whose shapes begin with 1"])
        if not stateful:
            runtime._copies = "input" in mutates(frozen, inputs=True)
            if device == "cpu":
                runtime._take_the_faster(loaded, artifact)
        return runtime

    def run(self, inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> dict[str, Tensor]:
        """Compute the named outputs. Raises ModelFailed or OutOfMemory (allocated, available, tensor)."""
        try:
            found = self._returned(inputs)
            return {name: self._checked(name, found[name]) for name in outputs}
        except HeadraceError:
            raise
        except KeyError as error:
            raise ModelFailed(f"the model returned no output {error}; it returned {sorted(found)}") from error
        except Exception as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Free memory. Idempotent."""
        self._module = None
        if self.device != "cpu":
            torch.cuda.empty_cache()

    def _returned(self, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
        """Run it; return what it returned by the names of the outputs (numbered ones where there are none yet)."""
        module = self._module
        if module is None:
            raise ModelFailed("the model is closed")
        if self._pid != os.getpid():
            # The threads of its pool did not come along; torch would wait for them for ever.
            raise ModelFailed("the model was loaded before a fork; load it in the process that runs it")
        # Of this thread: OpenMP keeps a number for each.
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        with torch.inference_mode():
            given = {name: _to_torch(inputs[name], self.device, copy=self._copies) for name in self._call.names}
            answer = module(**given) if self._call.by_name else module(*given.values())
        if isinstance(answer, Mapping):
            return dict(answer)
        parts = [answer] if isinstance(answer, torch.Tensor) else list(answer)
        names = self.signature.output_names or [f"output_{place}" for place in range(len(parts))]
        if len(names) != len(parts):
            raise ModelFailed(
                f"the model returned {len(parts)} tensors, declared are {names}",
                details={"expected": names, "actual": len(parts)},
            )
        return dict(zip(names, parts, strict=True))

    def _checked(self, name: str, value: Any) -> Tensor:
        datatype = _datatype(value)
        expected = self._datatypes[name]
        if datatype is not expected or value.dim() != self._ranks[name]:
            shape = list(value.shape) if isinstance(value, torch.Tensor) else []
            actual = f"{datatype or getattr(value, 'dtype', type(value).__name__)} {shape}"
            raise ModelFailed(
                f"output {name!r} is {actual}; declared is {expected} with {self._ranks[name]} dimensions",
                details={"output": name, "expected": str(expected), "actual": actual},
            )
        return _from_torch(value, datatype)

    def _failed(self, error: Exception) -> HeadraceError:
        wanted = memory_wanted(error)
        if wanted is None:
            return ModelFailed(f"the model failed: {why(error)}")
        free = torch.cuda.mem_get_info(self.device)[0] if self.device != "cpu" else None
        return out_of_memory(*wanted, available=free)

    def _sign(self, artifact: Artifact) -> None:
        """Take the signature from the card, or find it out with the example."""
        given = artifact.given
        if given.signature is not None:
            _check_datatypes(artifact, given.signature)
            self.signature = given.signature
        else:
            assert given.example is not None
            self.signature = self._exemplified(artifact, given.example)
        count = self._call.outputs
        if count is not None and count != len(self.signature.outputs):
            reason = f"it returns {count} tensors, and its card declares {len(self.signature.outputs)} outputs"
            raise load_failed(artifact, reason, [f"{count} outputs"])
        self._datatypes = {spec.name: spec.datatype for spec in self.signature.outputs}
        self._ranks = {spec.name: len(spec.shape) for spec in self.signature.outputs}

    def _exemplified(self, artifact: Artifact, example: Mapping[str, Tensor]) -> Signature:
        """Return the signature of one run, its first dimension open where twice the rows give twice the answers."""
        once = self._try(artifact, example)
        specs = [(name, _datatype(value), tuple(value.shape)) for name, value in once.items()]
        for name, datatype, _ in specs:
            if datatype is None:
                raise load_failed(artifact, f"output {name!r} is not a tensor that we serve", EXPECTED)
        rows = {tensor.rows if tensor.shape else 0 for tensor in example.values()}
        is_open = len(rows) == 1 and 0 not in rows and self.concurrent
        if is_open:
            twice = {n: Tensor(t.datatype, np.concatenate([t.array, t.array])) for n, t in example.items()}
            try:
                both = self._try(artifact, twice)
                is_open = all(
                    value.dim() > 0 and once[name].dim() > 0 and value.shape[0] == 2 * once[name].shape[0]
                    for name, value in both.items()
                )
            except ModelLoadFailed:
                is_open = False
        lead = slice(1, None) if is_open else slice(None)
        head = (-1,) if is_open else ()
        return Signature(
            tuple(TensorSpec(n, t.datatype, (*head, *t.shape[lead])) for n, t in example.items()),
            tuple(TensorSpec(n, d, (*head, *shape[lead])) for n, d, shape in specs if d is not None),
        )

    def _try(self, artifact: Artifact, example: Mapping[str, Tensor]) -> dict[str, Any]:
        try:
            return self._returned(example)
        except Exception as error:
            told = error.message if isinstance(error, HeadraceError) else why(error)
            raise load_failed(artifact, f"it fails on its example: {told}", EXPECTED) from error

    def _take_the_faster(self, loaded: Any, artifact: Artifact) -> None:
        """Try what `optimize_for_inference` makes of it: kept where it answers the same, faster."""
        inputs = artifact.given.example or _zeros(self.signature)
        plain_module = self._module
        try:
            expected = self.run(inputs, self.signature.output_names)
            run_s = self._run_s(inputs)
            if run_s > _RUN_S_MAX:
                return
            with quiet():
                # Frozen anew: it is changed in place.
                self._module = torch.jit.optimize_for_inference(torch.jit.freeze(loaded))
            found = self.run(inputs, self.signature.output_names)
            if not _alike(found, expected) or self._run_s(inputs) > _FASTER * run_s:
                self._module = plain_module
        except Exception:
            # Made-up inputs need not suit it, and not every model survives the optimisation: the plain one serves.
            self._module = plain_module

    def _run_s(self, inputs: Mapping[str, Tensor]) -> float:
        clock = SystemClock()
        times = []
        for _ in range(2 * _TIMED_RUNS):
            began_s = clock.monotonic_s()
            self.run(inputs, self.signature.output_names)
            times.append(clock.monotonic_s() - began_s)
            if times[-1] > _RUN_S_MAX:
                break
        return min(times[_TIMED_RUNS:] or times)


def _device(artifact: Artifact) -> str:
    asked = artifact.device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == "cpu" or (asked == "auto" and not count):
        return "cpu"
    number = int(asked.partition(":")[2] or 0)
    if number >= count:
        hint = "" if torch.version.cuda else "this torch is built without CUDA"
        raise no_device(artifact, ["cpu", *(f"cuda:{each}" for each in range(count))], hint)
    return f"cuda:{number}"


def _named_inputs(artifact: Artifact) -> list[str]:
    given = artifact.given
    if given.signature is not None:
        return given.signature.input_names
    if given.example is not None:
        return list(given.example)
    assert artifact.path is not None
    stem = artifact.path.stem
    files = [f"{stem}.card.json", f"{stem}.example.npz", f"{stem}.example.json"]
    reason = (
        "TorchScript says neither datatypes nor shapes, and nothing beside it does: "
        f"give a signature in {files[0]}, or one example input as {files[1]} or {files[2]}"
    )
    raise load_failed(artifact, reason, files)


def _allow_state(artifact: Artifact) -> None:
    if not artifact.given.stateful:
        assert artifact.path is not None
        reason = (
            "it keeps state from one run to the next, so that callers would get each other's; hand the state in and "
            f'out as tensors, or say "stateful": true in {artifact.path.stem}.card.json to have it run one at a time'
        )
        raise load_failed(artifact, reason, EXPECTED)


def _changed_by_a_run(artifact: Artifact, loaded: Any, call: Calling) -> bool:
    """Return whether a run wrote into a weight; where no inputs can be made up, only the graph can tell."""
    given = artifact.given
    inputs = given.example or (_zeros(given.signature) if given.signature is not None else {})
    tensors = list(loaded.state_dict().values())
    before = [tensor._version for tensor in tensors]
    try:
        with torch.inference_mode():
            tensors_in = {name: _to_torch(inputs[name], _device(artifact), copy=True) for name in call.names}
            loaded(**tensors_in) if call.by_name else loaded(*tensors_in.values())
    except Exception:
        return False  # what is wrong with it is told by whoever needs the run
    return [tensor._version for tensor in tensors] != before


def _check_datatypes(artifact: Artifact, signature: Signature) -> None:
    for spec in (*signature.inputs, *signature.outputs):
        if spec.datatype is Datatype.BYTES:
            reason = f"its card declares {spec.name!r} as BYTES, and TorchScript has no text; take UINT8 or INT64"
            raise load_failed(artifact, reason, [str(datatype) for datatype in _DATATYPES.values()])


def _datatype(value: Any) -> Datatype | None:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_quantized:
        return None
    return _DATATYPES.get(value.dtype)


def _to_torch(tensor: Tensor, device: str, *, copy: bool) -> Any:
    array = tensor.array
    # torch has no read-only tensors; it says so, and would let the model write into the request's own bytes.
    if copy or not array.flags.writeable:
        array = array.copy()
    if tensor.datatype is Datatype.BF16:
        made = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    else:
        made = torch.from_numpy(array)
    return made if device == "cpu" else made.to(device)


def _from_torch(value: Any, datatype: Datatype) -> Tensor:
    value = value.detach().cpu().contiguous().resolve_neg()
    if datatype is Datatype.BF16:
        return Tensor(datatype, value.view(torch.int16).numpy().view(ml_dtypes.bfloat16))
    return Tensor(datatype, value.numpy())


def _zeros(signature: Signature) -> dict[str, Tensor]:
    return {
        spec.name: Tensor(spec.datatype, np.zeros([max(1, n) if n < 0 else n for n in spec.shape], spec.datatype.numpy))
        for spec in signature.inputs
    }


def _alike(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return all(
        found[name].shape == tensor.shape
        and np.allclose(
            found[name].array.astype(np.float64),
            tensor.array.astype(np.float64),
            rtol=_TOLERANCE,
            atol=_TOLERANCE / 10,
            equal_nan=True,
        )
        for name, tensor in expected.items()
    )
