"""The batcher: runs what waits as soon as a runner is free, up to a number of rows.

It never waits for company: a batch is whatever came while the runners were busy, and a request that finds one free
starts in the next turn of the loop. Rows run together only where names, datatypes, inner shapes and the outputs asked
for agree. A batch that fails is run again item by item, so that a bad item fails alone; one that ran out of memory
is halved. Everything here happens on one event loop, except `Batch.run` and `Batcher.progress`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from headrace.clock import Clock
from headrace.errors import HeadraceError, Internal, ModelUnavailable, OutOfMemory, Overloaded
from headrace.models.batch import Batch, BatchSettings, Pending, Progress, copy_of
from headrace.models.line import WaitingLine
from headrace.models.meter import BatchMeter
from headrace.models.runners import Runner, ThreadRunner
from headrace.models.statistics import Statistics
from headrace.runtimes import Runtime, WrongRows
from headrace.telemetry.trace import TraceContext
from headrace.tensor import InferRequest

__all__ = ["BatchSettings", "Batcher", "Progress"]

#: An inline model that was this slow three times running (or ten times this once) was misjudged at warm-up.
_INLINE_S_MAX = 0.005


class Batcher(WaitingLine):
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
        super().__init__(settings.size_max)
        signature = runtime.signature
        self.model = model
        self.version = version
        self.signature = signature
        self.batchable = signature.batchable if batchable is None else batchable and signature.batchable
        self._runtime: Runtime | None = runtime
        self._settings = settings
        self._clock = clock
        self._meter = meter
        self._loop = asyncio.get_running_loop()
        self._names = tuple(spec.name for spec in signature.outputs)
        # Where every inner dimension is fixed, checked requests agree in shape, and there is nothing to compare.
        self._ragged = any(-1 in spec.shape[1:] for spec in signature.inputs)
        self._runners = tuple(runners)
        self._free = [runner for runner in self._runners if runner.alive]
        self._kind = self._runners[0].kind
        self._running: set[Batch] = set()
        self._runs = 0
        self._rows_per_s = 1 / row_s if row_s else 0.0
        self._inline_for_good = inline_for_good
        self._slow = 0
        self._scheduled = False
        #: Called when somebody comes while there are no runners at all.
        self._wake: Callable[[], None] | None = None
        self._idle: asyncio.Future[None] | None = None
        self._quiet: asyncio.Future[None] | None = None

    @property
    def runner(self) -> str:
        """Return the kind of runner in use: inline, thread or process."""
        return self._kind

    @property
    def statistics(self) -> Statistics:
        """Return what was done since this version was loaded."""
        return self._meter.statistics

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
        if self._refusal is not None:
            raise copy_of(self._refusal)
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
        self.used_s = now_s = self._clock.monotonic_s()
        pending = Pending(self, request, names, rows, size, now_s, trace, loop=self._loop)
        self._line.append(pending)
        if key is not None:
            pending.key = key
            mates = self._mates.get(key)
            if mates is None:
                mates = self._mates[key] = deque()
            mates.append(pending)
        self._waiting_rows += rows
        self._waiting_bytes += size
        if self._free:
            if not self._scheduled:
                self._schedule()
        elif self._wake is not None:
            self._wake()
        return pending

    async def close(self) -> None:
        """Take nothing new, finish what waits and runs, stop the runners.

        Bound it with a timeout: cancelling it answers what is left `model_unavailable` and stops waiting.
        """
        self.refuse(ModelUnavailable(f"model {self.model!r} is being unloaded"))
        self._wake = None
        try:
            anybody = any(runner.alive for runner in self._runners)
            if self._running or (anybody and (self._waiting_rows or self._again)):
                self._idle = self._loop.create_future()
                await self._idle
        finally:
            self._abandon()

    # -- runners that come and go -------------------------------------------------------------------------------

    async def rest(self, wake: Callable[[], None]) -> None:
        """Start nothing more, wait for what runs, and let go of the runtime and its runners.

        Requests line up all the same; `wake` is called when somebody comes, or is there. Cancelled, it leaves all as
        it was.
        """
        runners, self._runners, self._free = self._runners, (), []
        try:
            while self._running:
                self._quiet = self._loop.create_future()
                await self._quiet
        except asyncio.CancelledError:
            self._runners = runners
            for runner in runners:
                self.back(runner)
            raise
        for runner in runners:
            runner.stop()
        self._runtime, self._wake = None, wake
        if self._waiting_rows or self._again:
            wake()

    def go_on(self, runtime: Runtime, runners: Iterable[Runner], *, batchable: bool) -> None:
        """Serve again after `rest`, or with other runners than before; who waits is run now."""
        if runtime.signature != self.signature:
            # What was checked against the old one is not guessed to fit.
            self.dismiss(ModelUnavailable(f"model {self.model!r} was replaced by one that takes something else"))
            self.signature = runtime.signature
            self._names = tuple(spec.name for spec in runtime.signature.outputs)
            self._ragged = any(-1 in spec.shape[1:] for spec in runtime.signature.inputs)
        self.batchable = runtime.signature.batchable and batchable
        self._runtime, self._runners = runtime, tuple(runners)
        self._kind = self._runners[0].kind
        self._free = [runner for runner in self._runners if runner.alive]
        self._wake = self._refusal = None
        if self._free and not self._scheduled:
            self._schedule()

    def lost(self, runner: Runner) -> bool:
        """Hand nothing to a runner that has died; return whether any is left alive."""
        if runner in self._free:
            self._free.remove(runner)
        return any(other.alive for other in self._runners)

    def back(self, runner: Runner) -> None:
        """Use a runner again that was lost."""
        if runner in self._runners and runner.alive and runner not in self._free and runner.since_s is None:
            self._free.append(runner)
        if self._free and not self._scheduled:
            self._schedule()

    # -- taking -------------------------------------------------------------------------------------------------

    def _key(self, request: InferRequest, names: tuple[str, ...]) -> object:
        if not self._ragged:
            return names
        inputs = request.inputs
        return names, tuple([inputs[spec.name].array.shape[1:] for spec in self.signature.inputs])

    def _schedule(self) -> None:
        self._scheduled = True
        self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Start a batch on every free runner. What goes wrong here ends with those it concerns."""
        self._scheduled = False
        while self._free and not self._scheduled:
            if not self._free[-1].alive:
                self._free.pop()  # it died just now, of which we are about to be told
                continue
            members = self._take()
            if not members:
                break
            runner = self._free.pop()
            try:
                self._start(runner, members)
            except Exception as error:
                self._repair(runner, members, error)
        self._check_idle()

    # -- running ----------------------------------------------------------------------------------------------

    def _start(self, runner: Runner, members: list[Pending]) -> None:
        now_s = self._clock.monotonic_s()
        for pending in members:
            pending.queue_time_ms = (now_s - pending.since_s) * 1000
        runtime = runner.runtime or self._runtime
        assert runtime is not None
        batch = Batch(members, runtime, self.model, self.version, self.batchable, self._clock)
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
        if runner.alive and runner in self._runners:
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
            self._meter.statistics.answered(len(members), batch.rows, _waited_s(members), run_s, self._clock.now_ms())
        elif len(members) == 1 or isinstance(error, WrongRows | ModelUnavailable):
            # After a wrong number of rows nobody can say whose are missing; alone, it would be luck. And what killed
            # a runner's process is not handed to another one.
            self._meter.failed(error, len(members))
            self._meter.statistics.refused(len(members), _waited_s(members), run_s)
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
        self._runners, self._kind = (thread,), thread.kind
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
        if runner not in self._free and runner in self._runners and runner.alive:
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
        quiet = self._quiet
        if quiet is not None and not self._running and not quiet.done():
            quiet.set_result(None)

    def _abandon(self) -> None:
        error = ModelUnavailable(f"model {self.model!r} was unloaded before it came to this request")
        self.dismiss(error)
        self._check_idle()
        for batch in self._running:
            for pending in batch.members:
                pending.refuse(error)
        for runner in self._runners:
            runner.stop()


def _waited_s(members: list[Pending]) -> float:
    return sum([pending.queue_time_ms or 0.0 for pending in members]) / 1000
