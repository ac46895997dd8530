"""The host: loads versions, warms them, keeps them, and lets go of them. One broken model stops no other.

Loading happens on a thread of its own, one version at a time; a version is ready only after its first runs.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeVar

from headrace.clock import Clock
from headrace.errors import HeadraceError, Internal
from headrace.message import ErrorRecord
from headrace.models.batcher import Batcher, BatchSettings
from headrace.models.cards import Card, CardBook
from headrace.models.digests import created_at_ms, digest_of, stamps_of
from headrace.models.meter import BatchMeter
from headrace.models.quota import cpu_quota, threads_for
from headrace.models.registry import by_version
from headrace.models.runners import InlineRunner, Runner, ThreadRunner
from headrace.models.warm import Warm, warm_up
from headrace.runtimes import DEVICE, Artifact, Runtime, load_runtime
from headrace.settings import setting
from headrace.telemetry.logs import Logs
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.trace import Tracer

__all__ = ["INLINE_ROW_S", "Hosted", "ModelHost", "ModelSettings"]

#: A row faster than this runs on the event loop: handing it to a thread would take as long.
INLINE_ROW_S = 0.0003
#: … unless a full batch would hold up the loop for longer than this.
_INLINE_BATCH_S = 0.003

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """How models are loaded and run."""

    section: ClassVar[str] = "model"

    threads: int = setting(
        0, "Threads that one run may use; 0: the CPU quota, divided among processes and models.", min=0, max=1024
    )
    device: str = setting(
        "auto",
        "Where models run: `auto` (a GPU if its runtime finds one), `cpu`, `cuda` or `cuda:N`; what is named must be "
        "there. The card beside a model goes before it.",
    )
    runner: str = setting("auto", "Where models run; `auto` measures at warm-up.", choices=("auto", "inline", "thread"))
    runners: int = setting(
        1, "Batches of one version that may run at a time, where its runtime allows it.", min=1, max=256
    )
    require_all: bool = setting(True, "Whether one model that failed to load makes the service not ready.")
    links: bool = setting(False, "Whether links may lead out of a model's folder.")

    def faults(self) -> Iterator[tuple[str, str]]:
        """Yield what one field alone cannot tell."""
        if not DEVICE.fullmatch(self.device):
            yield "device", "wanted auto, cpu, cuda or cuda:N"


@dataclass(slots=True, eq=False)
class Hosted:
    """One version in this process."""

    artifact: Artifact
    state: Literal["loading", "ready", "failed", "unloaded"] = "loading"
    card: Card | None = None
    batcher: Batcher | None = None
    error: HeadraceError | None = None
    runtime: Runtime | None = field(default=None, repr=False)
    warm: Warm | None = None

    @property
    def reason(self) -> str:
        """Return why it cannot answer, for people; "" when it is ready."""
        if self.state == "ready":
            return ""
        return self.error.message if self.error is not None else f"it is {self.state}"


class ModelHost:
    """The versions of one process."""

    def __init__(
        self,
        *,
        settings: ModelSettings,
        batch: BatchSettings,
        clock: Clock,
        metrics: Metrics,
        logs: Logs,
        tracer: Tracer | None = None,
        workers: int = 1,
        book: CardBook | None = None,
    ) -> None:
        """Host nothing yet. `workers` processes share the CPU quota; each version's card is written to `book`."""
        self.settings = settings
        self.versions: dict[tuple[str, str], Hosted] = {}
        #: Grows with every change of state, for whoever keeps a list of them.
        self.generation = 0
        self._batch = batch
        self._clock = clock
        self._metrics = metrics
        self._logs = logs
        self._tracer = tracer
        self._workers = workers
        self._book = book

    def named(self, name: str) -> list[Hosted]:
        """Return the versions of a model, the highest first."""
        found = [hosted for (model, _), hosted in self.versions.items() if model == name]
        return sorted(found, key=lambda hosted: by_version(hosted.artifact.version), reverse=True)

    async def load(self, artifacts: Sequence[Artifact]) -> Mapping[tuple[str, str], Hosted]:
        """Load versions one after the other; return all that are hosted. A failure is a state, not an exception.

        Loading a version that is there already replaces it once the new one is warm.
        """
        models = len({artifact.name for artifact in artifacts} | {name for name, _ in self.versions})
        threads = self.settings.threads or threads_for(cpu_quota(), self._workers, models)
        arriving = [Hosted(artifact) for artifact in artifacts]
        for hosted in arriving:
            self.versions.setdefault((hosted.artifact.name, hosted.artifact.version), hosted)
        self.generation += 1
        for hosted in arriving:
            await self._load(hosted, threads)
        return self.versions

    async def unload(self, name: str, version: str, *, timeout_s: float = 30.0) -> None:
        """Let a version finish what it has, for at most `timeout_s`, and free it. Not being there is no error."""
        hosted = self.versions.pop((name, version), None)
        self.generation += 1
        if hosted is not None:
            await self._let_go(hosted, timeout_s)

    async def close(self, *, timeout_s: float = 30.0) -> None:
        """Let every version finish what it has, all at once, for at most `timeout_s`, and free them."""
        leaving = list(self.versions.values())
        self.generation += 1
        await asyncio.gather(*(self._let_go(hosted, timeout_s) for hosted in leaving))

    async def _load(self, hosted: Hosted, threads: int) -> None:
        artifact = hosted.artifact
        key = (artifact.name, artifact.version)
        named = {"model": artifact.name, "model_version": artifact.version}
        self._logs.say("model_loading", **named, runtime=artifact.runtime)
        span = (
            self._tracer.span("model_loaded", model=artifact.name, model_version=artifact.version)
            if self._tracer is not None
            else None
        )
        began_s = self._clock.monotonic_s()
        error: HeadraceError | None = None
        try:
            await _on_a_thread(lambda: self._load_and_warm(hosted, threads), f"load-{artifact.name}")
            self._begin(hosted)
        except HeadraceError as failure:
            error = failure
        except Exception as failure:
            error = Internal()
            error.__cause__ = failure
        load_s = self._clock.monotonic_s() - began_s
        hosted.error = error
        if span is not None:
            if error is not None:
                span.fail(error)
            span.end()
        old = self.versions.get(key)
        if error is not None and old is not None and old is not hosted and old.state == "ready":
            hosted.state = "failed"
            self._tell(hosted, threads, load_s)
            return  # a failed load never disturbs what serves
        if error is not None:
            hosted.card = self._failed_card(hosted, error)
        # Before it is ready: whoever sees a ready version finds its card.
        await self._write_card(hosted)
        hosted.state = "ready" if error is None else "failed"
        self.versions[key] = hosted
        self.generation += 1
        self._metrics.gauge("headrace_model_ready")(*key).set(error is None)
        self._tell(hosted, threads, load_s)
        if old is not None and old is not hosted:
            await self._let_go(old, 30.0)

    def _load_and_warm(self, hosted: Hosted, threads: int) -> None:
        """Do what takes long; called on a thread."""
        artifact = hosted.artifact
        if artifact.path is None and artifact.root is not None and str(artifact.root) not in sys.path:
            # As `python -m` would: a module beside the models is found, whatever started this process.
            sys.path.insert(0, str(artifact.root))
        stamps = stamps_of(artifact)
        try:
            if self._book is not None:
                self._book.refresh()
            digest = self._book.digest(artifact) if self._book is not None else digest_of(artifact)
        except OSError:
            digest = ""  # the runtime says better what is wrong with the file
        hosted.card = Card(
            name=artifact.name,
            version=artifact.version,
            runtime=artifact.runtime,
            digest=digest,
            files=stamps,
            entry=artifact.entry,
            created_at_ms=created_at_ms(stamps),
        )
        runtime = load_runtime(artifact, threads=threads, device=self.settings.device)
        try:
            hosted.warm = warm_up(
                runtime, artifact, size_max=self._batch.size_max, fast_s=INLINE_ROW_S, clock=self._clock
            )
        except BaseException:
            runtime.close()
            raise
        hosted.runtime = runtime
        hosted.card = _with(hosted.card, platform=runtime.platform, signature=runtime.signature)

    def _begin(self, hosted: Hosted) -> None:
        runtime, warm, artifact = hosted.runtime, hosted.warm, hosted.artifact
        assert runtime is not None and warm is not None
        hosted.batcher = Batcher(
            runtime,
            self._runners(runtime, warm, artifact.name),
            model=artifact.name,
            version=artifact.version,
            settings=self._batch,
            clock=self._clock,
            meter=BatchMeter(
                self._metrics,
                self._logs,
                self._clock,
                model=artifact.name,
                version=artifact.version,
                tracer=self._tracer,
            ),
            batchable=warm.batchable,
            row_s=warm.row_s,
            inline_for_good=self.settings.runner == "inline",
        )

    def _runners(self, runtime: Runtime, warm: Warm, name: str) -> list[Runner]:
        kind = self.settings.runner
        if kind == "auto":
            fast = warm.row_s is not None and warm.row_s < INLINE_ROW_S and (warm.batch_s or 0) < _INLINE_BATCH_S
            # What a Python callable takes for zeros says nothing of what it will take for the next caller.
            kind = "inline" if fast and runtime.steady else "thread"
        if kind == "inline":
            return [InlineRunner()]
        count = self.settings.runners if runtime.concurrent else 1
        loop = asyncio.get_running_loop()
        return [ThreadRunner(loop, f"run-{name}-{number}") for number in range(count)]

    def _failed_card(self, hosted: Hosted, error: HeadraceError) -> Card:
        artifact = hosted.artifact
        record = ErrorRecord(code=error.code, message=error.message, details=error.details)
        card = hosted.card or Card(name=artifact.name, version=artifact.version, runtime=artifact.runtime)
        return _with(card, platform="", signature=None, error=record)

    async def _write_card(self, hosted: Hosted) -> None:
        book, card = self._book, hosted.card
        if book is None or card is None:
            return
        named = {"model": card.name, "model_version": card.version}
        try:
            if await _on_a_thread(lambda: book.write(card), "card"):
                self._logs.say("card_written", **named)
        except (OSError, HeadraceError) as error:
            self._logs.say("card_refused", card=f"{card.name}/{card.version}.json", reason=type(error).__name__)

    def _tell(self, hosted: Hosted, threads: int, load_s: float) -> None:
        artifact = hosted.artifact
        named = {"model": artifact.name, "model_version": artifact.version}
        if hosted.error is not None:
            self._logs.say("model_load_failed", **named, error=hosted.error, details=hosted.error.details)
            return
        assert hosted.batcher is not None and hosted.warm is not None
        self._metrics.gauge("headrace_model_load_seconds")(artifact.name, artifact.version).set(load_s)
        row_s = hosted.warm.row_s
        self._logs.say(
            "model_loaded",
            **named,
            load_ms=round(load_s * 1000, 1),
            threads=threads,
            device=hosted.runtime.device if hosted.runtime is not None else None,
            runner=hosted.batcher.runner,
            batchable=hosted.batcher.batchable,
            row_ms=None if row_s is None else round(row_s * 1000, 3),
            note=hosted.warm.note or None,
        )

    async def _let_go(self, hosted: Hosted, timeout_s: float) -> None:
        hosted.state = "unloaded"
        self.generation += 1
        artifact, batcher, runtime = hosted.artifact, hosted.batcher, hosted.runtime
        drained = True
        if batcher is not None:
            try:
                async with asyncio.timeout(timeout_s):
                    await batcher.close()
            except TimeoutError:
                drained = False
        # A run that does not end still uses it; then the process's end frees it.
        if runtime is not None and drained:
            try:
                await _on_a_thread(runtime.close, "close")
            except HeadraceError as error:
                self._logs.say("run_failed", model=artifact.name, model_version=artifact.version, error=error)
        self._metrics.gauge("headrace_model_ready").forget(artifact.name, artifact.version)
        self._logs.say("model_unloaded", model=artifact.name, model_version=artifact.version)


def _with(card: Card, **changes: object) -> Card:
    values = {name: getattr(card, name) for name in Card.__struct_fields__}
    return Card(**{**values, **changes})


async def _on_a_thread(work: Callable[[], T], name: str) -> T:
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
