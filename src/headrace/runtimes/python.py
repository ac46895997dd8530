"""The python runtime: a callable that declares its signature with `@headrace.model(...)`.

    @headrace.model(inputs={"x": "FP32[-1,3]"}, outputs={"label": "BYTES[-1]"})
    def classify(inputs):
        return {"label": np.where(inputs["x"].sum(1) > 0, "yes", "no")}

The callable is handed a dict of arrays that are its own (it may write into them) and returns a dict of arrays, or
one array where there is one output. BYTES come in as object arrays of `bytes` and may go out as any array or list
of text or bytes. A class is instantiated once at load and keeps state; so does what a factory returns. A callable
that finds a value unfit raises `headrace.errors.InvalidValue`: that is told to the caller as the caller's fault.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from headrace.errors import (
    CallerError,
    DtypeMismatch,
    HeadraceError,
    InvalidRequest,
    InvalidValue,
    MissingInput,
    ModelFailed,
    ModelLoadFailed,
    OutOfMemory,
    ShapeMismatch,
    UnknownInput,
)
from headrace.runtimes.base import Artifact, Runtime, WrongRows, out_of_memory, plain
from headrace.tensor import Datatype, Signature, Tensor, TensorSpec

__all__ = ["PythonRuntime", "model"]

T = TypeVar("T", bound=Callable[..., Any])

_SPEC = re.compile(r"\s*([A-Z0-9]+)\s*\[([-\d,\s]*)\]\s*")
_FLOATS = frozenset({Datatype.FP16, Datatype.FP32, Datatype.FP64, Datatype.BF16})
#: What a model may say itself. Anything else it raises is its failure: it knows nothing of our lines and stores.
_MAY_RAISE = frozenset(
    {DtypeMismatch, InvalidRequest, InvalidValue, MissingInput, ModelFailed, OutOfMemory, ShapeMismatch, UnknownInput}
)
_ATTRIBUTE = "__headrace_model__"


@dataclass(frozen=True, slots=True)
class _Declaration:
    signature: Signature
    concurrent: bool
    factory: bool


def model(
    *,
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
    concurrent: bool = False,
    factory: bool = False,
) -> Callable[[T], T]:
    """Declare what a callable takes and gives, e.g. `{"x": "FP32[-1,3]"}`; -1 is any length, `[]` a scalar.

    Where every first dimension is -1, rows of several requests may be handed over together. `concurrent` allows
    calls from several threads at once. With `factory` (implied for a class) it is called once, without arguments,
    and what it returns is the model; its `close()` is called at the end, if it has one.
    """
    signature = Signature(
        tuple(_spec(name, text) for name, text in inputs.items()),
        tuple(_spec(name, text) for name, text in outputs.items()),
    )

    def declare(target: T) -> T:
        made = factory or isinstance(target, type)
        setattr(target, _ATTRIBUTE, _Declaration(signature, concurrent, made))
        return target

    return declare


class PythonRuntime(Runtime):
    """A Python callable."""

    platform = "python"

    def __init__(self, call: Callable[..., Any], signature: Signature, *, concurrent: bool) -> None:
        self.signature = signature
        self.concurrent = concurrent
        self._call: Callable[..., Any] | None = call
        self._specs = {spec.name: spec for spec in signature.outputs}

    @classmethod
    def load(cls, artifact: Artifact, *, threads: int) -> PythonRuntime:
        """Import the entry. Raises ModelLoadFailed naming the entry, the reason and what was expected."""
        entry = artifact.entry or ""
        module, _, name = entry.partition(":")
        try:
            target: Any = importlib.import_module(module)
            for part in name.split("."):
                target = getattr(target, part)
            declaration = getattr(target, _ATTRIBUTE, None)
            if not isinstance(declaration, _Declaration):
                raise _load_failed(artifact, "it declares no signature; decorate it with @headrace.model(...)")
            call = target() if declaration.factory else target
        except HeadraceError as error:
            raise error if isinstance(error, ModelLoadFailed) else _load_failed(artifact, str(error)) from error
        except ModuleNotFoundError as error:
            reason = f"there is no module {error.name!r}"
            raise _load_failed(artifact, reason) from error
        except (Exception, SystemExit) as error:
            raise _load_failed(artifact, f"{type(error).__name__}: {error}") from error
        if not callable(call):
            raise _load_failed(artifact, "what it makes cannot be called")
        return cls(call, declaration.signature, concurrent=declaration.concurrent)

    def run(self, inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> dict[str, Tensor]:
        """Call it and check what it returns. Raises ModelFailed naming the output, or OutOfMemory."""
        call = self._call
        if call is None:
            raise ModelFailed("the model is closed")
        # Copies: what it does to its arrays must not reach the request, whose rows may be run again.
        given = {name: tensor.array.copy() for name, tensor in inputs.items()}
        try:
            returned = call(given)
        except MemoryError as error:
            raise _memory(error) from error
        except BaseException as error:
            # It runs on a thread of ours, or between two turns of the loop: nothing that it raises is meant for us.
            if type(error) in _MAY_RAISE:
                raise
            text = plain(error)
            raise ModelFailed(f"{type(error).__name__}: {text}" if text else type(error).__name__) from error
        rows = next(iter(inputs.values())).rows if self.signature.batchable else None
        results = self._named(returned)
        try:
            return {name: _checked(self._specs[name], results[name], rows) for name in outputs}
        except MemoryError as error:
            raise _memory(error) from error

    def close(self) -> None:
        """Let go of the callable, closing it first if it can be closed. Idempotent."""
        call, self._call = self._call, None
        closing = getattr(call, "close", None)
        if callable(closing):
            try:
                closing()
            except Exception as error:
                raise ModelFailed(f"close() raised {type(error).__name__}: {plain(error)}") from error

    def _named(self, returned: Any) -> Mapping[str, Any]:
        specs = self._specs
        if not isinstance(returned, Mapping):
            if len(specs) != 1:
                raise ModelFailed(
                    f"it returned {type(returned).__name__}; with several outputs it must return a dict of them",
                    details={"expected": list(specs), "actual": type(returned).__name__},
                )
            return {next(iter(specs)): returned}
        for name in specs:
            if name not in returned:
                raise _wrong(name, "is missing from what the model returned", list(specs), _names(returned))
            if returned[name] is None:
                raise _wrong(name, "is None", str(specs[name].datatype), None)
        for name in returned:
            if name not in specs:
                raise _wrong(plain(name), "is not declared", list(specs), _names(returned))
        return returned


def _spec(name: str, text: str) -> TensorSpec:
    match = _SPEC.fullmatch(text)
    if match is None:
        raise ValueError(f"{name!r}: expected something like 'FP32[-1,3]', got {text!r}")
    known = {str(datatype): datatype for datatype in Datatype}
    if match[1] not in known:
        raise ValueError(f"{name!r}: there is no datatype {match[1]!r}; there are {list(known)}")
    shape = tuple(int(part) for part in match[2].split(",") if part.strip())
    if any(dimension < -1 for dimension in shape):
        raise ValueError(f"{name!r}: a dimension is -1 (any length) or not negative, got {text!r}")
    return TensorSpec(name, known[match[1]], shape)


def _checked(spec: TensorSpec, value: Any, rows: int | None) -> Tensor:
    """Return one output as a tensor of its own (never a view of what the model may write into again)."""
    try:
        if isinstance(value, np.ndarray | np.generic):
            array = np.array(value, order="C")
        else:
            array = _from_plain(spec.datatype, value)
        tensor = Tensor.of(array, spec.datatype)
    except (CallerError, ValueError, TypeError, OverflowError) as error:
        actual = str(getattr(value, "dtype", type(value).__name__))
        raise _wrong(spec.name, f"is not {spec.datatype}", str(spec.datatype), actual) from error
    actual_shape, expected = list(tensor.shape), list(spec.shape)
    if len(actual_shape) != len(expected) or any(
        want not in (-1, got) for want, got in zip(expected, actual_shape, strict=True)
    ):
        raise _wrong(spec.name, f"has shape {actual_shape}, declared is {expected}", expected, actual_shape)
    if rows is not None and tensor.rows != rows:
        raise WrongRows(
            f"output {spec.name!r} has {tensor.rows} rows for {rows} that were given",
            details={"output": spec.name, "expected": [rows, *expected[1:]], "actual": actual_shape},
        )
    return tensor


def _from_plain(datatype: Datatype, value: Any) -> Any:
    """Return an array of a list or a number, which have no datatype of their own; nothing is rounded or wrapped."""
    if datatype is not Datatype.BYTES:
        found = np.array(value)
        kinds = "b" if datatype is Datatype.BOOL else "iuf" if datatype in _FLOATS else "iu"
        if found.size and found.dtype.kind not in kinds:
            raise TypeError(f"{found.dtype} is not {datatype}")
    return np.array(value, dtype=datatype.numpy, order="C")


def _names(returned: Mapping[Any, Any]) -> list[str]:
    return [plain(name) for name in list(returned)[:20]]


def _wrong(output: str, text: str, expected: object, actual: object) -> ModelFailed:
    return ModelFailed(f"output {output!r} {text}", details={"output": output, "expected": expected, "actual": actual})


def _memory(error: MemoryError) -> HeadraceError:
    # numpy's own MemoryError knows what it could not make.
    shape, dtype = getattr(error, "shape", None), getattr(error, "dtype", None)
    if shape is None or dtype is None:
        return out_of_memory(None, None)
    count = 1
    for dimension in shape:
        count *= int(dimension)
    return out_of_memory(count * int(dtype.itemsize), f"{dtype}{list(shape)}")


def _load_failed(artifact: Artifact, reason: str) -> ModelLoadFailed:
    reason = plain(reason)
    return ModelLoadFailed(
        f"model {artifact.name!r} cannot be loaded: {artifact.shown}: {reason}",
        details={"file": artifact.shown, "reason": reason, "expected": ["package.module:callable"]},
    )
