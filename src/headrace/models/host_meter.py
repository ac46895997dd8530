"""What a host tells of its versions: metrics, log lines, spans and cards."""

from __future__ import annotations

from headrace.errors import HeadraceError
from headrace.message import ErrorRecord
from headrace.models.cards import Card, CardBook
from headrace.models.hosted import Hosted
from headrace.models.loading import on_a_thread, with_changes
from headrace.telemetry.logs import Logs
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.trace import Span, Tracer

__all__ = ["HostMeter", "failed_card"]


class HostMeter:
    """Counts and says on the event loop."""

    def __init__(self, metrics: Metrics, logs: Logs, tracer: Tracer | None, book: CardBook | None) -> None:
        self._logs, self._tracer, self._book = logs, tracer, book
        self._ready = metrics.gauge("headrace_model_ready")
        self._memory = metrics.gauge("headrace_model_memory_bytes")
        self._load_s = metrics.gauge("headrace_model_load_seconds")
        self._evictions = metrics.counter("headrace_model_evictions_total")
        self._budget = metrics.gauge("headrace_model_memory_budget_bytes")

    def budget(self, size: int) -> None:
        """Show how many bytes all versions may take."""
        self._budget().set(size)

    def loading(self, hosted: Hosted) -> Span | None:
        """Say that a load begins; return its span, None where nobody takes spans."""
        artifact = hosted.artifact
        self._logs.say("model_loading", **_named(hosted), runtime=artifact.runtime)
        if self._tracer is None:
            return None
        return self._tracer.span("model_loaded", model=artifact.name, model_version=artifact.version)

    def loaded(self, hosted: Hosted, load_s: float, threads: int) -> None:
        """Say how a load ended: `hosted.error` is why it failed."""
        if hosted.error is not None:
            self._logs.say("model_load_failed", **_named(hosted), error=hosted.error, details=hosted.error.details)
            return
        assert hosted.batcher is not None and hosted.warm is not None
        self._load_s(*_labels(hosted)).set(load_s)
        row_s = hosted.warm.row_s
        self._logs.say(
            "model_loaded",
            **_named(hosted),
            load_ms=round(load_s * 1000, 1),
            threads=threads,
            device=hosted.runtime.device if hosted.runtime is not None else None,
            runner=hosted.batcher.runner,
            batchable=hosted.batcher.batchable,
            row_ms=None if row_s is None else round(row_s * 1000, 3),
            memory_bytes=hosted.memory_bytes,
            note=hosted.warm.note or None,
        )

    def ready(self, hosted: Hosted) -> None:
        """Show whether a version is ready."""
        self._ready(*_labels(hosted)).set(hosted.ready)

    def memory(self, hosted: Hosted) -> None:
        """Show what a version takes."""
        self._memory(*_labels(hosted)).set(hosted.memory_bytes)

    def evicted(self, hosted: Hosted, idle_s: float, freed: int, before: int, after: int) -> None:
        """Say that a version of `freed` bytes was evicted; `before` and `after` are the memory of this process."""
        self.memory(hosted)
        self._evictions(*_labels(hosted)).add()
        self._logs.say(
            "model_evicted",
            **_named(hosted),
            idle_s=round(idle_s, 1),
            memory_bytes=freed,
            resident_bytes_before=before,
            resident_bytes=after,
        )

    def forget(self, hosted: Hosted) -> None:
        """Show nothing more of a version."""
        for gauge in (self._ready, self._memory):
            gauge.forget(*_labels(hosted))

    def unloaded(self, hosted: Hosted) -> None:
        """Say that a version was unloaded."""
        self._logs.say("model_unloaded", **_named(hosted))

    def failed_to_close(self, hosted: Hosted, error: HeadraceError) -> None:
        """Say what a version raised when it was closed."""
        self._logs.say("run_failed", **_named(hosted), error=error)

    async def write_card(self, hosted: Hosted) -> None:
        """Write a version's card, where there is a book."""
        book, card = self._book, hosted.card
        if book is None or card is None:
            return
        try:
            if await on_a_thread(lambda: book.write(card), "card"):
                self._logs.say("card_written", **_named(hosted))
        except (OSError, HeadraceError) as error:
            self._logs.say("card_refused", card=f"{card.name}/{card.version}.json", reason=type(error).__name__)


def failed_card(hosted: Hosted, error: HeadraceError) -> Card:
    """Return the card of a version that could not be loaded."""
    artifact = hosted.artifact
    record = ErrorRecord(code=error.code, message=error.message, details=error.details)
    card = hosted.card or Card(name=artifact.name, version=artifact.version, runtime=artifact.runtime)
    return with_changes(card, platform="", signature=None, error=record)


def _labels(hosted: Hosted) -> tuple[str, str]:
    return hosted.artifact.name, hosted.artifact.version


def _named(hosted: Hosted) -> dict[str, str]:
    return {"model": hosted.artifact.name, "model_version": hosted.artifact.version}
