"""The first runs of a version, before anybody waits for it: does it run, may its rows run together, how fast is it.

Inputs are made up from the signature: zeros, empty text, one row, and 1 for every other open dimension (then a few
larger sizes, for models that need more). What a failure means depends on how much was made up. Where every inner
dimension is fixed and there is no text, a version that cannot run on zeros is broken, and loading it has failed. Where
sizes or text were invented, or where the version itself calls the value unfit, the failure says little: it goes
live unproved, and a note says so. Out of memory is always a failure.

Where samples lie beside the model (see `samples`), all of them are run, and one that fails is always a failure.

Rows run together only where that is proved: two different rows must get the same answers together as apart. This
finds models that mix rows (a softmax over the wrong axis) or that have a batch of 1 built in.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import numpy as np

from headrace.clock import Clock
from headrace.errors import CallerError, HeadraceError, ModelFailed, ModelLoadFailed, OutOfMemory
from headrace.models.samples import samples_of
from headrace.runtimes import Artifact, Runtime
from headrace.tensor import Datatype, Signature, Tensor, TensorSpec

__all__ = ["Warm", "make_findable", "warm_up"]

#: What open inner dimensions are tried with, in turn.
_SIZES = (1, 8, 64, 224)
_RUNS = 7
_TIMING_S_MAX = 0.05
#: A first run that took longer than this was not only cold.
_COLD_S_MAX = 1.0

_FLOATS = {Datatype.FP16: 1e-2, Datatype.BF16: 3e-2, Datatype.FP32: 1e-3, Datatype.FP64: 1e-3}


@dataclass(frozen=True, slots=True)
class Warm:
    """What the first runs showed."""

    #: Whether rows of several requests may run together.
    batchable: bool
    #: Median time of one row; None where no made-up input could be run.
    row_s: float | None = None
    #: Time of one batch of `size_max` rows, where one row is so fast that it matters.
    batch_s: float | None = None
    #: What is unproved or denied, and why; "" where all is well.
    note: str = ""


def make_findable(artifact: Artifact) -> None:
    """Let the modules beside the models be found, as `python -m` would, whatever started this process."""
    if artifact.path is None and artifact.root is not None and str(artifact.root) not in sys.path:
        sys.path.insert(0, str(artifact.root))


def warm_up(runtime: Runtime, artifact: Artifact, *, size_max: int, fast_s: float, clock: Clock) -> Warm:
    """Run a loaded version; may mend `runtime.signature` where a declared output shape is proved wrong.

    Models faster than `fast_s` a row are measured at `size_max` rows too. Raises ModelLoadFailed.
    """
    signature = runtime.signature
    samples = samples_of(artifact, signature)
    guessing = not samples and _guessing(signature)
    tried = _try_samples(runtime, samples, clock) if samples else _first_run(runtime, guessing, clock)
    if isinstance(tried, HeadraceError):
        reason = f"its first run failed: {tried}"
        if isinstance(tried, OutOfMemory) or samples or not (guessing or isinstance(tried, CallerError)):
            raise ModelLoadFailed(
                f"model {artifact.name!r} cannot be loaded: {artifact.shown}: {reason}",
                details={**tried.details, "file": artifact.shown, "reason": reason},
            ) from tried
        return Warm(signature.batchable, note=f"it could not be tried with made-up inputs: {tried}")
    tried = _mend(runtime, tried)
    row_s = tried.run_s
    denied = _denied(runtime, tried) if runtime.signature.batchable and size_max > 1 else ""
    batchable = runtime.signature.batchable and not denied
    batch_s = None
    if _TIMING_S_MAX <= row_s < _COLD_S_MAX:
        # Some runtimes (TensorFlow) take 100 ms for a first run and 1 ms for a second.
        row_s = min(row_s, _timed(runtime, tried.inputs, clock, runs_max=1))
    # A slow model is not run again only to know more precisely how slow it is.
    if row_s < _TIMING_S_MAX:
        row_s = _timed(runtime, tried.inputs, clock)
    if batchable and row_s < fast_s and size_max > 1:
        batch_s = _timed(runtime, _repeated(tried.inputs, size_max), clock)
    return Warm(batchable, row_s, batch_s, denied)


@dataclass(frozen=True, slots=True)
class _Tried:
    """The first run that worked."""

    #: One row, where rows may run together; all of the first sample else.
    inputs: dict[str, Tensor]
    #: Another row of the same shape, to be run beside it.
    other: dict[str, Tensor]
    outputs: dict[str, Tensor]
    run_s: float


def _guessing(signature: Signature) -> bool:
    """Return whether made-up inputs are guesses in more than their numbers."""
    for spec in signature.inputs:
        inner = spec.shape[1:] if signature.batchable else spec.shape
        if spec.datatype is Datatype.BYTES or -1 in inner:
            return True
    return False


def _first_run(runtime: Runtime, guessing: bool, clock: Clock) -> _Tried | HeadraceError:
    """Find a size for the open dimensions that runs; else return the first failure."""
    first: HeadraceError | None = None
    for size in _SIZES if guessing else _SIZES[:1]:
        began_s = clock.monotonic_s()
        try:
            inputs = _made_up(runtime.signature, 1, size)
            outputs = _run(runtime, inputs)
            run_s = clock.monotonic_s() - began_s
            return _Tried(inputs, _made_up(runtime.signature, 1, size, other=True), outputs, run_s)
        except OutOfMemory as error:
            return error
        except HeadraceError as error:
            first = first or error
    assert first is not None
    return first


def _try_samples(runtime: Runtime, samples: list[dict[str, Tensor]], clock: Clock) -> _Tried | HeadraceError:
    """Run every sample; return the first failure, or what the first row of the first one gave."""
    signature = runtime.signature
    try:
        for inputs in samples:
            _run(runtime, inputs)
        first = samples[0]
        others = [*samples[1:], first]
        if signature.batchable:
            rows = [_row(inputs, place) for inputs in samples for place in range(min(2, _rows_in(inputs)))]
            if not rows:
                return ModelFailed("the samples hold no row")
            first, others = rows[0], [*rows[1:], rows[0]]
        shapes = {name: tensor.shape for name, tensor in first.items()}
        other = next(each for each in others if {name: tensor.shape for name, tensor in each.items()} == shapes)
        began_s = clock.monotonic_s()
        outputs = _run(runtime, first)
        return _Tried(first, other, outputs, clock.monotonic_s() - began_s)
    except HeadraceError as error:
        return error


def _mend(runtime: Runtime, tried: _Tried) -> _Tried:
    """Open the first dimension of outputs that are declared fixed but follow the rows.

    Exporters of tree ensembles declare `[1]` and return one entry a row.
    """
    signature = runtime.signature
    if signature.batchable or not all(spec.shape[:1] == (-1,) for spec in signature.inputs):
        return tried
    open_inputs = Signature(signature.inputs, ())
    if not open_inputs.batchable:
        return tried
    try:
        one = _row(tried.inputs, 0)
        counts = [_run(runtime, _repeated(one, rows)) for rows in (1, 2)]
    except HeadraceError:
        return tried
    mended = []
    for spec in signature.outputs:
        follows = all(
            got[spec.name].array.ndim == len(spec.shape) > 0 and got[spec.name].rows == rows
            for rows, got in enumerate(counts, 1)
        )
        mended.append(TensorSpec(spec.name, spec.datatype, (-1, *spec.shape[1:])) if follows else spec)
    runtime.signature = Signature(signature.inputs, tuple(mended))
    # From now on it has rows, and one of them is what is run beside another.
    return _Tried(one, _row(tried.other, 0), counts[0], tried.run_s)


def _denied(runtime: Runtime, tried: _Tried) -> str:
    """Return why rows must not run together; "" where it is proved that they may."""
    rows = [tried.inputs, tried.other]
    apart = [tried.outputs, tried.outputs]
    try:
        apart[1] = _run(runtime, rows[1])
    except HeadraceError:
        rows[1] = rows[0]  # the other values do not suit it: two rows of the first kind will do
    both = {
        name: Tensor(tensor.datatype, np.concatenate([tensor.array, rows[1][name].array]))
        for name, tensor in rows[0].items()
    }
    try:
        together = _run(runtime, both)
    except HeadraceError as error:
        return f"two rows cannot run together: {error}"
    for name, tensor in together.items():
        if not tensor.array.ndim or tensor.rows != 2:
            return f"output {name!r} has shape {list(tensor.shape)} for two rows"
        for place, alone in enumerate(apart):
            if not _alike(tensor.datatype, tensor.array[place], alone[name].array[0]):
                return f"output {name!r} of a row depends on the row beside it"
    return ""


def _alike(datatype: Datatype, one: object, other: object) -> bool:
    left, right = np.asarray(one), np.asarray(other)
    if left.shape != right.shape:
        return False
    tolerance = _FLOATS.get(datatype)
    if tolerance is None:
        return bool(left.tolist() == right.tolist())
    left, right = left.astype(np.float64), right.astype(np.float64)
    return bool(np.allclose(left, right, rtol=tolerance, atol=tolerance / 10, equal_nan=True))


def _made_up(signature: Signature, rows: int, size: int, *, other: bool = False) -> dict[str, Tensor]:
    """Return inputs of zeros; with `other`, of something small that is not zero."""
    made = {}
    for spec in signature.inputs:
        shape = [size if dimension < 0 else dimension for dimension in spec.shape]
        if signature.batchable:
            shape[0] = rows
        if spec.datatype is Datatype.BYTES:
            array = np.full(shape, b"a" if other else b"", dtype=object)
        else:
            # A 64th is exact in every floating type, and near enough to zero for models that wait or count.
            value = (1 / 64 if spec.datatype in _FLOATS else 1) if other else 0
            array = np.full(shape, value, dtype=spec.datatype.numpy)
        made[spec.name] = Tensor(spec.datatype, array)
    return made


def _rows_in(inputs: Mapping[str, Tensor]) -> int:
    return next(iter(inputs.values())).rows


def _row(inputs: Mapping[str, Tensor], place: int) -> dict[str, Tensor]:
    return {name: Tensor(tensor.datatype, tensor.array[place : place + 1]) for name, tensor in inputs.items()}


def _repeated(inputs: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
    return {name: Tensor(t.datatype, np.concatenate([t.array] * rows)) for name, t in inputs.items()}


def _run(runtime: Runtime, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return runtime.run(inputs, runtime.signature.output_names)


def _timed(runtime: Runtime, inputs: Mapping[str, Tensor], clock: Clock, runs_max: int = _RUNS) -> float:
    """Return the median time of a few runs; a slow model is run twice, a fast one a few times."""
    times: list[float] = []
    try:
        while len(times) < min(2, runs_max) or (len(times) < runs_max and sum(times) < _TIMING_S_MAX):
            began_s = clock.monotonic_s()
            _run(runtime, inputs)
            times.append(clock.monotonic_s() - began_s)
    except HeadraceError:
        return float("inf")  # too many rows for it, or moody; a thread will do
    # The first one still allocates.
    return median(times[1:] or times)
