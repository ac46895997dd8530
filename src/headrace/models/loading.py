"""Loading a version and warming it up, here or in processes of its own, and freeing it again.

What takes long is called on a thread of its own: loading that hangs must keep neither the loop nor the process's end.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import threading
from collections.abc import Callable
from typing import TypeVar

from headrace.clock import Clock
from headrace.errors import Internal
from headrace.models.batch import BatchSettings
from headrace.models.batcher import Batcher
from headrace.models.cards import Card, CardBook
from headrace.models.digests import created_at_ms, digest_of, stamps_of
from headrace.models.frames import Begin
from headrace.models.hosted import Hosted, ModelSettings
from headrace.models.memory import give_back, held_by, resident_bytes
from headrace.models.meter import BatchMeter
from headrace.models.process_runner import ProcessRunner
from headrace.models.runners import InlineRunner, Runner, ThreadRunner
from headrace.models.warm import Warm, make_findable, warm_up
from headrace.runtimes import RUNTIMES, Artifact, Runtime, load_runtime
from headrace.telemetry.logs import Logs
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.trace import Tracer
from headrace.tensor import Signature

__all__ = ["INLINE_ROW_S", "Loader", "free", "on_a_thread", "with_changes"]

#: A row faster than this runs on the event loop: handing it to a thread would take as long.
INLINE_ROW_S = 0.0003
#: … unless a full batch would hold up the loop for longer than this.
_INLINE_BATCH_S = 0.003

T = TypeVar("T")


class Loader:
    """Loads versions as the settings say."""

    def __init__(
        self,
        *,
        settings: ModelSettings,
        batch: BatchSettings,
        clock: Clock,
        metrics: Metrics,
        logs: Logs,
        tracer: Tracer | None,
        book: CardBook | None,
        apart: bool,
        changed: Callable[[Hosted, ProcessRunner], None],
    ) -> None:
        """`apart`: versions may run in processes of their own, and `changed` is called, on any thread, when one of
        those died or is back."""
        self._settings, self._batch, self._clock = settings, batch, clock
        self._metrics, self._logs, self._tracer, self._book = metrics, logs, tracer, book
        self._apart, self._changed = apart, changed

    # -- on a thread ----------------------------------------------------------------------------------------------

    def load(self, hosted: Hosted, threads: int) -> None:
        """Load, warm and measure a version; blocking. Raises ModelLoadFailed and OutOfMemory; then nothing is held."""
        artifact = hosted.artifact
        make_findable(artifact)
        hosted.card = self._card(artifact)
        if self._wanted_kind(artifact) == "process":
            self._load_apart(hosted, threads)
        else:
            self._load_here(hosted, threads)
        assert hosted.runtime is not None
        runtime = hosted.runtime
        hosted.card = with_changes(hosted.card, platform=runtime.platform, signature=runtime.signature)

    def _card(self, artifact: Artifact) -> Card:
        stamps = stamps_of(artifact)
        try:
            if self._book is not None:
                self._book.refresh()
            digest = self._book.digest(artifact) if self._book is not None else digest_of(artifact)
        except OSError:
            digest = ""  # the runtime says better what is wrong with the file
        return Card(
            name=artifact.name,
            version=artifact.version,
            runtime=artifact.runtime,
            digest=digest,
            files=stamps,
            entry=artifact.entry,
            created_at_ms=created_at_ms(stamps),
        )

    def _load_here(self, hosted: Hosted, threads: int) -> None:
        artifact, card = hosted.artifact, hosted.card
        assert card is not None
        # What the library itself takes stays when the model goes, and is not counted as the first model's.
        with contextlib.suppress(ImportError, LookupError):  # which `load_runtime` will say better
            importlib.import_module(RUNTIMES[artifact.runtime].module)
        before = resident_bytes()
        runtime = load_runtime(artifact, threads=threads, device=self._settings.device)
        try:
            warm = warm_up(runtime, artifact, size_max=self._batch.size_max, fast_s=INLINE_ROW_S, clock=self._clock)
            kind = self._kind(artifact, runtime, warm)
        except BaseException:
            runtime.close()
            raise
        if kind == "process":
            runtime.close()
            del runtime
            give_back()
            self._load_apart(hosted, threads)
            return
        give_back(collect=False)
        # Memory that was free before shows no growth; less than its files no model takes.
        hosted.memory_bytes = max(resident_bytes() - before, sum(stamp.size for stamp in card.files))
        hosted.runtime, hosted.warm = runtime, warm

    def _load_apart(self, hosted: Hosted, threads: int) -> None:
        begin = Begin.of(
            hosted.artifact,
            threads=threads,
            device=self._settings.device,
            size_max=self._batch.size_max,
            fast_s=INLINE_ROW_S,
        )
        crew: list[ProcessRunner] = []
        try:
            for number in range(self._settings.runners):
                runner = ProcessRunner(
                    begin,
                    number=number,
                    run_s_max=self._settings.run_s_max,
                    say=self._logs.say,
                    changed=lambda runner: self._changed(hosted, runner),
                )
                crew.append(runner)
                ready = runner.open()
        except BaseException:
            for runner in crew:
                runner.close()
            raise
        hosted.crew, hosted.runtime = crew, crew[0].runtime
        hosted.warm = Warm(ready.batchable, ready.row_s, ready.batch_s, ready.note)
        hosted.memory_bytes = held_by(runner.pid for runner in crew if runner.pid is not None)

    # -- on the loop ----------------------------------------------------------------------------------------------

    def begin(self, hosted: Hosted, line: Batcher | None = None) -> None:
        """Give a loaded version its runners and a batcher: `line` if that is given, where requests wait already."""
        runtime, warm, artifact = hosted.runtime, hosted.warm, hosted.artifact
        assert runtime is not None and warm is not None
        runners = self._runners(hosted, runtime, warm)
        hosted.loaded_s = self._clock.monotonic_s()
        if line is not None:
            hosted.batcher = line
            line.go_on(runtime, runners, batchable=warm.batchable)
            return
        meter = BatchMeter(
            self._metrics, self._logs, self._clock, model=artifact.name, version=artifact.version, tracer=self._tracer
        )
        hosted.batcher = Batcher(
            runtime,
            runners,
            model=artifact.name,
            version=artifact.version,
            settings=self._batch,
            clock=self._clock,
            meter=meter,
            batchable=warm.batchable,
            row_s=warm.row_s,
            inline_for_good=self._settings.runner == "inline",
        )

    def _runners(self, hosted: Hosted, runtime: Runtime, warm: Warm) -> list[Runner]:
        name, loop = hosted.artifact.name, asyncio.get_running_loop()
        if hosted.crew:
            for number, runner in enumerate(hosted.crew):
                runner.serve(ThreadRunner(loop, f"run-{name}-{number}"))
            return list(hosted.crew)
        if self._kind(hosted.artifact, runtime, warm) == "inline":
            return [InlineRunner()]
        count = self._settings.runners if runtime.concurrent else 1
        return [ThreadRunner(loop, f"run-{name}-{number}") for number in range(count)]

    def _wanted_kind(self, artifact: Artifact) -> str:
        settings = self._settings
        kind = "process" if settings.names(settings.processes, artifact) else settings.runner
        return "auto" if kind == "process" and not self._apart else kind

    def _kind(self, artifact: Artifact, runtime: Runtime, warm: Warm) -> str:
        kind = self._wanted_kind(artifact)
        if kind != "auto":
            return kind
        fast = warm.row_s is not None and warm.row_s < INLINE_ROW_S and (warm.batch_s or 0) < _INLINE_BATCH_S
        # What a Python callable takes for zeros says nothing of what it will take for the next caller.
        if fast and runtime.steady:
            return "inline"
        # Several at a time were asked for, and in this process it can only do one.
        return "process" if self._apart and self._settings.runners > 1 and not runtime.concurrent else "thread"


def free(runtime: Runtime | None, crew: list[ProcessRunner]) -> None:
    """Close what a version held, and return its memory to the system; blocking. Raises what `close()` raises."""
    try:
        for runner in crew:
            runner.stop()  # all of them, so that they end at the same time
        for runner in crew:
            runner.close()
        if runtime is not None and not crew:
            runtime.close()
    finally:
        del runtime
        if not crew:
            give_back()


def with_changes(card: Card, *, platform: str, signature: Signature | None, **others: object) -> Card:
    """Return a card with other fields."""
    values = {name: getattr(card, name) for name in Card.__struct_fields__}
    return Card(**{**values, "platform": platform, "signature": signature, **others})


async def on_a_thread(work: Callable[[], T], name: str) -> T:
    """Run on a daemon thread: loading that hangs must not keep the process from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(value: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(value)  # type: ignore[arg-type]

    def go() -> None:
        value: T | None = None
        failure: BaseException | None = None
        try:
            value = work()
        except Exception as error:
            failure = error
        except BaseException as error:
            failure = Internal()
            failure.__cause__ = error
        try:
            loop.call_soon_threadsafe(tell, value, failure)
        except RuntimeError:
            return  # the loop is closed

    threading.Thread(target=go, name=name, daemon=True).start()
    return await done
