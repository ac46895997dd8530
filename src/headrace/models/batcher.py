"""The batcher: runs what waits as soon as a runner is free, up to a number of rows.

It never waits for company: a batch is whatever came while the runners were busy, and a request that finds one free
starts in the next turn of the loop. Rows run together only where names, datatypes, inner shapes and the outputs asked
for agree. A batch that fails is run again item by item, so that a bad item fails alone; one that ran out of memory
is halved. Everything here happens on one event loop, except `Batch.run` and `Batcher.progress`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from headrace.clock import Clock
from headrace.errors import HeadraceError, Internal, ModelUnavailable, OutOfMemory, Overloaded
from headrace.models.batch import Batch, Pending
from headrace.models.meter import BatchMeter
from headrace.models.runners import Runner, ThreadRunner
from headrace.runtimes import Runtime, WrongRows
from headrace.settings import setting
from headrace.telemetry.trace import TraceContext
from headrace.tensor import InferRequest

__all__ = ["BatchSettings", "Batcher", "Progress"]

#: An inline model that was this slow three times running (or ten times this once) was misjudged at warm-up.
_INLINE_S_MAX = 0.005


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


class Batcher:
    """The batches of one version."""

    def __init__(
        self,
        runtime: Runtime,
        runners: Iterable[Runner],
        *,
        model: str,
        version: str,
        settings: BatchSettings,
        clock: Clock,
        meter: BatchMeter,
        batchable: bool | None = None,
        row_s: float | None = None,
        inline_for_good: bool = False,
    ) -> None:
        """Serve `runtime` on `runners`, on the running loop.

        `batchable` False runs requests one at a time whatever the signature says. `row_s` is the time of one row as
        measured at warm-up. Unless `inline_for_good`, an inline model that turns out slow moves to a thread.
        """
        signature = runtime.signature
        self.model = model
        self.version = version
        self.signature = signature
        self.batchable = signature.batchable if batchable is None else batchable and signature.batchable
        self._runtime = runtime
        self._settings = settings
        self._size = settings.size_max
        self._clock = clock
        self._meter = meter
        self._loop = asyncio.get_running_loop()
        self._names = tuple(spec.name for spec in signature.outputs)
        # Where every inner dimension is fixed, checked requests agree in shape, and there is nothing to compare.
        self._ragged = any(-1 in spec.shape[1:] for spec in signature.inputs)
        self._runners = tuple(runners)
        self._free = list(self._runners)
        #: Who waits, oldest first, and the same by what they may run with. Who was taken or left is passed over.
        self._line: deque[Pending] = deque()
        self._mates: dict[object, deque[Pending]] = {}
        self._gone = 0
        #: Parts of failed batches, which go first.
        self._again: deque[list[Pending]] = deque()
        self._running: set[Batch] = set()
        self._waiting_rows = self._waiting_bytes = 0
        self._runs = 0
        self._rows_per_s = 1 / row_s if row_s else 0.0
        self._inline_for_good = inline_for_good
        self._slow = 0
        self._scheduled = False
        self._closed = False
        self._idle: asyncio.Future[None] | None = None

    @property
    def runner(self) -> str:
        """Return the kind of runner in use: inline or thread."""
        return self._runners[0].kind

    @property
    def waiting_rows(self) -> int:
        """Return the rows that wait; 0 once everybody was taken or has gone."""
        return self._waiting_rows

    @property
    def running(self) -> int:
        """Return the batches that run now."""
        return len(self._running)

    def progress(self) -> Progress:
        """Return how work goes on. May be called from any thread."""
        since = [runner.since_s for runner in self._runners]
        started = [began_s for began_s in since if began_s is not None]
        return Progress(self._runs, min(started, default=None), self._waiting_rows)

    def submit(self, request: InferRequest, trace: TraceContext | None = None) -> Pending:
        """Line up a checked request. Cancelling what is returned takes it out again if it has not started.

        Raises Overloaded (with the time after which there should be room) or ModelUnavailable at once.
        """
        if self._closed:
            raise ModelUnavailable(f"model {self.model!r} is being unloaded")
        names = self._names if request.outputs is None else tuple([o.name for o in request.outputs])
        rows = next(iter(request.inputs.values())).rows if self.batchable else 1
        # An empty request costs a run like any other, and in a batch a model that fails on it would hide that.
        key = self._key(request, names) if self.batchable and rows else None
        rows = rows or 1
        size = sum([tensor.array.nbytes for tensor in request.inputs.values()])
        if self._waiting_rows and (
            self._waiting_rows + rows > self._settings.waiting_rows_max
            or self._waiting_bytes + size > self._settings.waiting_bytes_max
        ):
            raise self._overloaded()
        pending = Pending(self, request, names, rows, size, self._clock.monotonic_s(), trace, loop=self._loop)
        self._line.append(pending)
        if key is not None:
            pending.key = key
            mates = self._mates.get(key)
            if mates is None:
                mates = self._mates[key] = deque()
            mates.append(pending)
        self._waiting_rows += rows
        self._waiting_bytes += size
        if self._free and not self._scheduled:
            self._schedule()
        return pending

    async def close(self) -> None:
        """Take nothing new, finish what waits and runs, stop the runners.

        Bound it with a timeout: cancelling it answers what is left `model_unavailable` and stops waiting.
        """
        self._closed = True
        try:
            if self._waiting_rows or self._running or self._again:
                self._idle = self._loop.create_future()
                await self._idle
        finally:
            self._abandon()

    def left(self, pending: Pending) -> None:
        """Take note that somebody who waited has gone (called by Pending)."""
        self._waiting_rows -= pending.rows
        self._waiting_bytes -= pending.size
        self._gone += 1
        # While a run hangs, callers come and give up: their remains must not pile up behind it.
        if self._gone > 64 and self._gone * 2 > len(self._line):
            self._sweep()

    # -- taking -----------------------------------------------------------------------------------------------

    def _key(self, request: InferRequest, names: tuple[str, ...]) -> object:
        if not self._ragged:
            return names
        inputs = request.inputs
        return names, tuple([inputs[spec.name].array.shape[1:] for spec in self._runtime.signature.inputs])

    def _schedule(self) -> None:
        self._scheduled = True
        self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Start a batch on every free runner. What goes wrong here ends with those it concerns."""
        self._scheduled = False
        while self._free and not self._scheduled:
            members = self._take()
            if not members:
                break
            runner = self._free.pop()
            try:
                self._start(runner, members)
            except Exception as error:
                self._repair(runner, members, error)
        self._check_idle()

    def _take(self) -> list[Pending]:
        while self._again:
            members = [pending for pending in self._again.popleft() if not pending.done()]
            if members:
                return members
        while self._line:
            first = self._line[0]
            if first.waiting:
                return self._with_mates(first)
            self._line.popleft()
        return []

    def _with_mates(self, first: Pending) -> list[Pending]:
        """Take the oldest and, in order, whoever may run with it, up to the number of rows."""
        members: list[Pending] = []
        if first.key is None:
            members.append(first)
        else:
            mates = self._mates[first.key]
            rows = 0
            while mates:
                pending = mates[0]
                if pending.waiting:
                    if members and rows + pending.rows > self._size:
                        break
                    members.append(pending)
                    rows += pending.rows
                mates.popleft()
            if not mates:
                del self._mates[first.key]
        for pending in members:
            pending.waiting = False
            self._waiting_rows -= pending.rows
            self._waiting_bytes -= pending.size
        line = self._line
        while line and not line[0].waiting:
            line.popleft()
        return members

    def _sweep(self) -> None:
        self._line = deque([pending for pending in self._line if pending.waiting])
        self._mates = {
            key: deque(kept)
            for key, mates in self._mates.items()
            if (kept := [pending for pending in mates if pending.waiting])
        }
        self._gone = 0

    # -- running ----------------------------------------------------------------------------------------------

    def _start(self, runner: Runner, members: list[Pending]) -> None:
        now_s = self._clock.monotonic_s()
        for pending in members:
            pending.queue_time_ms = (now_s - pending.since_s) * 1000
        batch = Batch(members, self._runtime, self.model, self.version, self.batchable, self._clock)
        batch.span = self._meter.begin([pending.trace for pending in members], batch.rows)
        self._running.add(batch)
        runner.since_s = now_s
        runner.start(batch.run, lambda: self._finish(runner, batch))

    def _finish(self, runner: Runner, batch: Batch) -> None:
        runner.since_s = None
        self._running.discard(batch)
        self._runs += 1
        try:
            self._tell(batch)
        except Exception as error:
            self._fail(batch.members, error)
        self._free.append(runner)
        if runner.kind == "inline":
            self._judge(runner, batch)
            # Between two inline batches the loop gets its turn.
            if (self._waiting_rows or self._again) and not self._scheduled:
                self._schedule()
        elif not self._scheduled:
            self._turn()

    def _tell(self, batch: Batch) -> None:
        """Give everybody in the batch what came of it."""
        members, error, run_s = batch.members, batch.error, batch.ended_s - batch.started_s
        self._meter.ran(batch.rows, len(members), run_s)
        if batch.span is not None:
            if error is not None:
                batch.span.fail(error)
            batch.span.end()
        if error is None:
            if run_s > 0:
                rate = batch.rows / run_s
                self._rows_per_s = 0.8 * self._rows_per_s + 0.2 * rate if self._rows_per_s else rate
            # After running out of memory the size grows back only by what was proved to fit.
            if batch.rows >= self._size < self._settings.size_max:
                self._size += 1
            for pending, answer in zip(members, batch.answers, strict=True):
                if not pending.done():
                    pending.set_result(answer)
            self._meter.succeeded(len(members))
        elif len(members) == 1 or isinstance(error, WrongRows):
            # After a wrong number of rows nobody can say whose are missing; alone, it would be luck.
            self._meter.failed(error, len(members))
            for pending in members:
                pending.refuse(error)
        else:
            self._meter.retried(error, len(members))
            for pending in members:
                pending.queue_time_ms = None  # it waits again, and must not look as if its run went on and on
            if isinstance(error, OutOfMemory):
                self._size = max(1, batch.rows // 2)
                middle = len(members) // 2
                self._again += [members[:middle], members[middle:]]
            else:
                self._again += [[pending] for pending in members]

    def _judge(self, runner: Runner, batch: Batch) -> None:
        """Move a model that turned out slow from the loop to a thread."""
        run_s = batch.ended_s - batch.started_s
        self._slow = self._slow + 1 if run_s > _INLINE_S_MAX else 0
        if self._inline_for_good or not (self._slow >= 3 or run_s > 10 * _INLINE_S_MAX):
            return
        thread = ThreadRunner(self._loop, f"run-{self.model}")
        self._runners = (thread,)
        self._free = [thread]
        runner.stop()

    # -- what goes wrong --------------------------------------------------------------------------------------

    def _overloaded(self) -> Overloaded:
        rate = self._rows_per_s * len(self._runners)
        return Overloaded(
            f"{self._waiting_rows} rows wait for model {self.model!r}",
            details={
                "model": self.model,
                "waiting_rows": self._waiting_rows,
                "waiting_rows_max": self._settings.waiting_rows_max,
                "waiting_bytes": self._waiting_bytes,
                "waiting_bytes_max": self._settings.waiting_bytes_max,
            },
            retry_after_s=self._waiting_rows / rate if rate else None,
        )

    def _repair(self, runner: Runner, members: list[Pending], error: Exception) -> None:
        """End what a fault of ours broke, and go on with the rest."""
        runner.since_s = None
        self._running = {batch for batch in self._running if batch.members is not members}
        self._fail(members, error)
        if runner not in self._free and runner in self._runners:
            self._free.append(runner)

    def _fail(self, members: list[Pending], error: Exception) -> None:
        self._meter.broke(error)
        failure = error if isinstance(error, HeadraceError) else Internal()
        failure.__cause__ = failure.__cause__ or (None if failure is error else error)
        for pending in members:
            pending.refuse(failure)

    def _check_idle(self) -> None:
        idle = self._idle
        if idle is not None and not (self._waiting_rows or self._running or self._again) and not idle.done():
            idle.set_result(None)

    def _abandon(self) -> None:
        left = [*self._line, *(p for part in self._again for p in part)]
        left += [pending for batch in self._running for pending in batch.members]
        for pending in left:
            pending.waiting = False
            pending.refuse(ModelUnavailable(f"model {self.model!r} was unloaded before it came to this request"))
        self._line.clear()
        self._mates.clear()
        self._again.clear()
        self._waiting_rows = self._waiting_bytes = 0
        for runner in self._runners:
            runner.stop()
