"""What one version tells of its batches: metrics, log lines, spans."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.clock import Clock
from headrace.errors import HeadraceError
from headrace.models.statistics import Statistics
from headrace.telemetry.logs import Logs
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.trace import Span, TraceContext, Tracer

__all__ = ["BatchMeter"]

#: At most one line about failed runs in this time: each has a traceback, and every request has a line of its own.
_LINE_EVERY_S = 1.0


class BatchMeter:
    """Counts on the event loop; the children of its metrics are looked up once."""

    def __init__(
        self,
        metrics: Metrics,
        logs: Logs,
        clock: Clock,
        *,
        model: str,
        version: str,
        tracer: Tracer | None = None,
    ) -> None:
        self._logs = logs
        self._clock = clock
        self._tracer = tracer if tracer is not None and tracer.enabled else None
        self._labels = (model, version)
        self._rows = metrics.histogram("headrace_batch_rows")(model)
        self._requests = metrics.histogram("headrace_batch_requests")(model)
        self._duration = metrics.histogram("headrace_inference_duration_seconds")(model, version)
        self._busy = metrics.counter("headrace_busy_seconds_total")(model)
        self._retries = metrics.counter("headrace_batch_retries_total")(model)
        self._outcomes = metrics.counter("headrace_inferences_total")
        self._succeeded = self._outcomes(model, version, "succeeded")
        self.statistics = Statistics()
        self._told_s: float | None = None
        self._untold = 0

    def begin(self, traces: Sequence[TraceContext | None], rows: int) -> Span | None:
        """Begin the span of a run, linked to the requests in it; None where nobody takes spans."""
        if self._tracer is None:
            return None
        links = [trace for trace in traces if trace is not None]
        parent = links[0] if links else None
        model, version = self._labels
        return self._tracer.span(
            "inference_executed", parent, links=links, model=model, model_version=version, rows=rows
        )

    def ran(self, rows: int, requests: int, run_s: float) -> None:
        """Count a run, good or bad."""
        self._rows.observe(rows)
        self._requests.observe(requests)
        self._duration.observe(run_s)
        self._busy.add(run_s)

    def succeeded(self, requests: int) -> None:
        """Count requests that were answered."""
        self._succeeded.add(requests)

    def failed(self, error: HeadraceError, requests: int) -> None:
        """Count requests that were told an error; log the cause of ours, now and then."""
        self._outcomes(*self._labels, error.code).add(requests)
        if error.fault != "ours":
            return
        now_s = self._clock.monotonic_s()
        if self._told_s is not None and now_s - self._told_s < _LINE_EVERY_S:
            self._untold += requests
            return
        model, version = self._labels
        self._logs.say("run_failed", model=model, model_version=version, error=error, untold=self._untold)
        self._told_s, self._untold = now_s, 0

    def retried(self, error: HeadraceError, requests: int) -> None:
        """Count a batch whose members run again without each other."""
        self._retries.add()
        self._logs.say("batch_retried", model=self._labels[0], requests=requests, error=error)

    def broke(self, error: BaseException) -> None:
        """Log a fault of the batcher's own."""
        self._logs.say("loop_failed", loop="batcher", model=self._labels[0], error=error)
