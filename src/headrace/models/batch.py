"""A batch and those who wait for it: joining their rows, running, and cutting the answers apart again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from headrace.clock import Clock
from headrace.errors import HeadraceError, Internal, ModelFailed
from headrace.runtimes import Runtime, WrongRows, out_of_memory
from headrace.settings import setting
from headrace.telemetry.trace import Span, TraceContext
from headrace.tensor import InferAnswer, InferRequest, Tensor

__all__ = ["Batch", "BatchSettings", "Line", "Pending", "Progress", "copy_of"]


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """How requests are run together."""

    section: ClassVar[str] = "batch"

    size_max: int = setting(64, "Most rows run together; a larger request runs alone.", min=1)
    waiting_rows_max: int = setting(
        16_384, "Most rows that may wait for one version's runners; more are answered `overloaded`.", min=1
    )
    waiting_bytes_max: int = setting(
        1 << 30, "Most bytes of tensors that may wait for one version's runners (text counts 8 a value).", min=1
    )


@dataclass(frozen=True, slots=True)
class Progress:
    """Whether work goes on, for whoever must decide to wait longer."""

    #: Runs finished so far, failed ones too.
    runs: int
    #: When the oldest run of now began (monotonic); None while nothing runs.
    running_since_s: float | None
    waiting_rows: int


class Line(Protocol):
    """Where a request waits."""

    version: str

    def left(self, pending: Pending) -> None:
        """Take note that somebody who waited has gone."""


class Pending(asyncio.Future[InferAnswer]):
    """A request that waits for its answer, and the future of that answer."""

    __slots__ = ("key", "line", "names", "queue_time_ms", "request", "rows", "since_s", "size", "trace", "waiting")

    def __init__(
        self,
        line: Line,
        request: InferRequest,
        names: tuple[str, ...],
        rows: int,
        size: int,
        since_s: float,
        trace: TraceContext | None,
        *,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(loop=loop)
        self.line = line
        self.request = request
        #: The outputs it gets, in this order.
        self.names = names
        self.rows = rows
        #: Bytes of its tensors.
        self.size = size
        self.since_s = since_s
        self.trace = trace
        #: What others must agree with to run with it; None: nobody may.
        self.key: object = None
        #: False once it was taken into a batch, or has gone.
        self.waiting = True
        #: How long it waited for the runner it has or had last; None while it waits.
        self.queue_time_ms: float | None = None

    @property
    def version(self) -> str:
        """Return the version that answers it."""
        return self.line.version

    def cancel(self, msg: Any | None = None) -> bool:
        """Give up; where it still waits, it leaves the line and is never run."""
        cancelled = super().cancel(msg)
        if cancelled and self.waiting:
            self.waiting = False
            self.line.left(self)
        return cancelled

    def refuse(self, error: HeadraceError) -> None:
        """Answer with an error, unless nobody waits any more."""
        if self.done():
            return
        self.set_exception(copy_of(error))


def copy_of(error: HeadraceError) -> HeadraceError:
    """Return an error for one of several callers: raising adds to its traceback, and it is raised in many places."""
    own = type(error)(error.message, details=error.details, retry_after_s=error.retry_after_s)
    own.__cause__ = error.__cause__
    return own


class Batch:
    """Requests that run together, once."""

    __slots__ = (
        "_batchable",
        "_clock",
        "_model",
        "_runtime",
        "_version",
        "answers",
        "ended_s",
        "error",
        "members",
        "rows",
        "span",
        "started_s",
    )

    def __init__(
        self,
        members: list[Pending],
        runtime: Runtime,
        model: str,
        version: str,
        batchable: bool,
        clock: Clock,
    ) -> None:
        self.members = members
        self.rows = sum([pending.rows for pending in members])
        self.answers: list[InferAnswer] = []
        self.error: HeadraceError | None = None
        self.span: Span | None = None
        self.started_s = self.ended_s = 0.0
        self._runtime = runtime
        self._model = model
        self._version = version
        self._batchable = batchable
        self._clock = clock

    def run(self) -> None:
        """Run on whatever thread this is; afterwards there are `answers`, one each in order, or an `error`."""
        self.started_s = self._clock.monotonic_s()
        try:
            self.answers = self._together() if len(self.members) > 1 else [self._alone()]
        except HeadraceError as error:
            self.error = error
        except MemoryError:
            self.error = out_of_memory(None, None)
        except BaseException as error:
            # A runtime translates what its library raises; what comes here is a fault of ours, and still an answer.
            self.error = Internal()
            self.error.__cause__ = error
        self.ended_s = self._clock.monotonic_s()

    def _alone(self) -> InferAnswer:
        (pending,) = self.members
        inputs = pending.request.inputs
        got = self._runtime.run(inputs, pending.names)
        rows = next(iter(inputs.values())).rows if self._batchable else None
        return self._answer(pending, {name: self._output(got, name, rows) for name in pending.names})

    def _together(self) -> list[InferAnswer]:
        members = self.members
        inputs = {
            name: Tensor(tensor.datatype, np.concatenate([pending.request.inputs[name].array for pending in members]))
            for name, tensor in members[0].request.inputs.items()
        }
        names = members[0].names
        got = self._runtime.run(inputs, names)
        whole = {name: self._output(got, name, self.rows) for name in names}
        answers, start = [], 0
        for pending in members:
            end = start + pending.rows
            part = {name: Tensor(t.datatype, t.array[start:end]) for name, t in whole.items()}
            answers.append(self._answer(pending, part))
            start = end
        return answers

    def _output(self, got: dict[str, Tensor], name: str, rows: int | None) -> Tensor:
        tensor = got.get(name)
        if tensor is None:
            raise ModelFailed(f"output {name!r} is missing from what the model returned", details={"output": name})
        if rows is not None and (not tensor.array.ndim or tensor.array.shape[0] != rows):
            raise WrongRows(
                f"output {name!r} has {tensor.rows if tensor.array.ndim else 'no'} rows for {rows} that were given",
                details={"output": name, "expected": rows, "actual": list(tensor.shape)},
            )
        return tensor

    def _answer(self, pending: Pending, outputs: dict[str, Tensor]) -> InferAnswer:
        return InferAnswer(model=self._model, version=self._version, id=pending.request.id, outputs=outputs)
