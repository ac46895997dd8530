"""Traces: W3C trace context in, spans out; one trace crosses HTTP, the topic, the batch and the webhook.

Spans go to exporters, here a log line each (at debug level) or a list for tests; one for OpenTelemetry needs only
`export`. Where nobody takes spans they cost the new span id that goes on to the next hop, and nothing else.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from headrace.clock import Clock
from headrace.telemetry.logs import Logs
from headrace.telemetry.names import SPANS

__all__ = [
    "Exporter",
    "LogExporter",
    "Recorder",
    "Span",
    "SpanRecord",
    "TraceContext",
    "Tracer",
    "new_trace",
    "parse_traceparent",
]

# https://www.w3.org/TR/trace-context/#traceparent-header: version 00 has exactly four fields; a later version may
# have more, after another dash; ff is not a version.
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_TRACESTATE_CHARS_MAX = 512
_TRACESTATE = re.compile(r"[\x20-\x7e]*", re.ASCII)


class TraceContext(NamedTuple):
    """Where in which trace we are."""

    trace_id: str
    span_id: str
    flags: int = 0
    tracestate: str | None = None

    @property
    def traceparent(self) -> str:
        """Return the header's value."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"

    @property
    def sampled(self) -> bool:
        """Return whether whoever began the trace wants it recorded."""
        return bool(self.flags & 1)

    def child(self) -> TraceContext:
        """Return the context of a new span under this one."""
        return self._replace(span_id=os.urandom(8).hex())


def parse_traceparent(traceparent: str | None, tracestate: str | None = None) -> TraceContext | None:
    """Read the two headers; whatever is malformed is as if it were not there, never an error."""
    found = _TRACEPARENT.fullmatch(traceparent.strip()) if traceparent else None
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    if tracestate is not None and (
        len(tracestate) > _TRACESTATE_CHARS_MAX or _TRACESTATE.fullmatch(tracestate) is None
    ):
        tracestate = None
    return TraceContext(trace_id, span_id, int(flags, 16) & 1, tracestate or None)


def new_trace(*, sampled: bool = False) -> TraceContext:
    """Begin a trace."""
    random = os.urandom(24).hex()
    return TraceContext(random[:32], random[32:], int(sampled))


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """One finished span."""

    name: str
    trace_id: str
    span_id: str
    #: None at the root of a trace.
    parent_id: str | None
    started_ms: int
    duration_ms: float
    attributes: dict[str, Any]
    #: (trace id, span id) of other spans: the requests of a batch, the batch of a request.
    links: tuple[tuple[str, str], ...] = ()
    #: Type or code of what ended it; None if it ended well.
    error: str | None = None


class Exporter(Protocol):
    """Takes finished spans. Must not wait and must not raise."""

    def export(self, record: SpanRecord) -> None:
        """Take one."""


class LogExporter:
    """Writes each span as the log line `span`."""

    def __init__(self, logs: Logs) -> None:
        self._logs = logs

    def export(self, record: SpanRecord) -> None:
        """Log it."""
        self._logs.say(
            "span",
            span=record.name,
            trace_id=record.trace_id,
            span_id=record.span_id,
            parent_id=record.parent_id,
            started_ms=record.started_ms,
            duration_ms=round(record.duration_ms, 3),
            error=record.error,
            links=[f"{trace_id}-{span_id}" for trace_id, span_id in record.links],
            **record.attributes,
        )


class Recorder:
    """Keeps the latest spans; for tests."""

    def __init__(self, count_max: int = 10_000) -> None:
        self.records: deque[SpanRecord] = deque(maxlen=count_max)

    def export(self, record: SpanRecord) -> None:
        """Keep it."""
        self.records.append(record)

    def named(self, name: str) -> list[SpanRecord]:
        """Return the spans of this name, in the order they ended."""
        return [record for record in self.records if record.name == name]


@dataclass(slots=True)
class Span:
    """One step in a trace; a context manager, or `end()` by hand. `context` is what the next hop gets."""

    name: str
    context: TraceContext
    parent_id: str | None
    _tracer: Tracer
    attributes: dict[str, Any]
    links: tuple[tuple[str, str], ...] = ()
    error: str | None = None
    _started_ms: int = 0
    _started_s: float = 0.0
    _ended: bool = field(default=False)

    def set(self, **attributes: Any) -> None:
        """Add what became known on the way."""
        self.attributes.update(attributes)

    def fail(self, error: BaseException | str) -> None:
        """Say that it ended badly; an error is noted by its code or its type, never by its text."""
        self.error = error if isinstance(error, str) else getattr(error, "code", "") or type(error).__name__

    def end(self) -> None:
        """Hand it to the exporters; only the first call counts."""
        if not self._ended:
            self._ended = True
            self._tracer._finish(self)

    def __enter__(self) -> Span:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.fail(error)
        self.end()


class Tracer:
    """Makes spans."""

    def __init__(self, clock: Clock, exporters: Sequence[Exporter] = ()) -> None:
        self._clock = clock
        self._exporters = tuple(exporters)
        #: False: spans go nowhere, so callers may leave out what is costly to find out.
        self.enabled = bool(self._exporters)

    def span(
        self,
        name: str,
        parent: TraceContext | None = None,
        *,
        links: Sequence[TraceContext] = (),
        **attributes: Any,
    ) -> Span:
        """Begin a span of the table under `parent`, or a new trace where there is none."""
        if name not in SPANS:
            raise LookupError(f"there is no span {name}; telemetry/names.py lists what there is")
        context = parent.child() if parent is not None else new_trace(sampled=self.enabled)
        span = Span(name, context, parent.span_id if parent is not None else None, self, attributes)
        if self.enabled:
            span.links = tuple((link.trace_id, link.span_id) for link in links)
            span._started_ms = self._clock.now_ms()
            span._started_s = self._clock.monotonic_s()
        return span

    def _finish(self, span: Span) -> None:
        if not self.enabled:
            return
        record = SpanRecord(
            name=span.name,
            trace_id=span.context.trace_id,
            span_id=span.context.span_id,
            parent_id=span.parent_id,
            started_ms=span._started_ms,
            duration_ms=(self._clock.monotonic_s() - span._started_s) * 1000,
            attributes=span.attributes,
            links=span.links,
            error=span.error,
        )
        for exporter in self._exporters:
            exporter.export(record)
