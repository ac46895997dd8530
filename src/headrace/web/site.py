"""What every handler is given: the door, the settings, what is counted, and the state of an orderly stop."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence

from headrace.clock import Clock
from headrace.errors import HeadraceError, InvalidRequest, ModelNotFound, NotReady, VersionNotFound
from headrace.models.statistics import Statistics
from headrace.services.door import Door, ModelState
from headrace.telemetry.logs import Logs
from headrace.telemetry.metrics import Counter, Histogram, Metrics
from headrace.telemetry.names import OTHER
from headrace.telemetry.trace import Tracer, parse_traceparent
from headrace.web.exchange import Exchange
from headrace.web.settings import WebSettings
from headrace.web.window import UNHEALTHY_RATE, Window

__all__ = ["Site"]

#: A name outside of this is answered "not found" without being repeated: it may be a path, or a terminal's codes.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class Site:
    """One listener's view of the service."""

    def __init__(
        self,
        door: Door,
        settings: WebSettings,
        metrics: Metrics,
        logs: Logs,
        clock: Clock,
        tracer: Tracer,
        scrape: Callable[[], Awaitable[bytes]],
        *,
        statistics: Callable[[str, str], Statistics | None] | None = None,
        rows_max: int = 0,
    ) -> None:
        """Hold what handlers need; `scrape` renders /metrics, `statistics` are those of a version, where it runs here.

        `rows_max` is the most rows run together.
        """
        self.statistics = statistics
        self.rows_max = rows_max
        self.door = door
        self.settings = settings
        self.clock = clock
        self.tracer = tracer
        self.scrape = scrape
        self.window = Window(clock, settings.health_window_s)
        #: An orderly stop has begun: ready is 503, answers ask to close their connection.
        self.draining = False
        self.stopping = asyncio.Event()
        #: The listener is closed: what still comes over open connections is refused.
        self.refusing = False
        #: The list of models that was looked at last, and the version to use if it was of one model.
        self._seen: Sequence[ModelState] | None = None
        self._sole: ModelState | None = None
        self._logs = logs
        self._requests = metrics.counter("headrace_http_requests_total")
        self._durations = metrics.histogram("headrace_http_request_duration_seconds")
        #: Label values are looked up once: (route, method, status) is a short list, since routes are templates.
        self._children: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}

    # -- models -----------------------------------------------------------------------------------------

    def sole(self) -> ModelState | None:
        """Return the version to use where a request names no model: only where there is one model."""
        models = self.door.models()
        if models is not self._seen:
            self._sole = None
            if models and models[0].name == models[-1].name:
                self._sole = self.door.model(models[0].name)
            self._seen = models
        return self._sole

    def the_model(self) -> ModelState:
        """Return the only model. Raises NotReady where there is none, InvalidRequest naming them if several."""
        sole = self.sole()
        if sole is not None:
            return sole
        names = sorted({state.name for state in self.door.models()})
        if not names:
            raise NotReady("No model is loaded", details={"models": []})
        raise InvalidRequest(
            "Several models are served: name one in the path, /predict/{model}", details={"models": names}
        )

    def model(self, name: str, version: str | None = None) -> ModelState:
        """Return a model named by a caller. Raises ModelNotFound or VersionNotFound."""
        if _NAME.fullmatch(name) is None:
            raise ModelNotFound
        if version is not None and _NAME.fullmatch(version) is None:
            raise VersionNotFound(details={"model": name})
        return self.door.model(name, version)

    def named(self, exchange: Exchange) -> ModelState:
        """Return the version that a path names, and note it. Raises ModelNotFound or VersionNotFound."""
        params = exchange.params
        state = self.model(params["model"], params.get("version"))
        exchange.model, exchange.model_version = state.name, state.version
        return state

    def shown_version(self) -> str:
        """Return what X-Model-Version says where no version was reached: the only model's, or `-`."""
        try:
            sole = self.sole()
        except HeadraceError:
            return "-"
        return sole.version if sole is not None else "-"

    # -- readiness --------------------------------------------------------------------------------------

    def begin_to_stop(self) -> None:
        """Turn not ready and end every long wait; requests are still served."""
        self.draining = True
        self.stopping.set()

    def reasons_stopping(self) -> list[str]:
        """Return why an orderly stop makes everything not ready; empty while there is none."""
        return ["the service is stopping"] if self.draining else []

    def reasons_not_ready(self) -> list[str]:
        """Return why requests would not be answered now; empty means ready."""
        reasons = [*self.reasons_stopping(), *self.door.ready()]
        if not self.door.models() and not reasons:
            # "All models are ready" is true of no model; a server without any must not be sent traffic.
            reasons.append("no model is loaded")
        if self.window.error_rate() > UNHEALTHY_RATE:
            reasons.append(f"more than {UNHEALTHY_RATE:.0%} of the latest requests failed")
        return reasons

    # -- what is seen of a request ----------------------------------------------------------------------

    def begin_trace(self, exchange: Exchange) -> None:
        """Begin the request's span: under the caller's where it sent one, else a new trace."""
        given, state = exchange.headers.get(b"traceparent"), exchange.headers.get(b"tracestate")
        parent = None
        if given is not None:
            parent = parse_traceparent(given.decode("latin-1"), None if state is None else state.decode("latin-1"))
        if parent is not None or self.tracer.enabled:
            exchange.span = self.tracer.span("request_received", parent, request_id=exchange.request_id)

    def observe(self, exchange: Exchange) -> None:
        """Count and log a request that is over."""
        latency_s = exchange.finished_s - exchange.started_s
        key = (exchange.template, exchange.method, exchange.status)
        children = self._children.get(key)
        if children is None:
            children = self._children_of(*key)
        children[0].add()
        children[1].observe(latency_s)
        error = exchange.error
        if exchange.kind and exchange.status != 499:
            latency_ms = latency_s * 1000 if exchange.kind == "inference" else None
            self.window.record(exchange.finished_s, latency_ms, own_failure=error is not None and error.fault == "ours")
        trace_id = None
        if exchange.span is not None:
            trace_id = exchange.span.context.trace_id
            if error is not None:
                exchange.span.fail(error)
            exchange.span.end()
        self._logs.request(
            request_id=exchange.request_id,
            model=exchange.model,
            model_version=exchange.model_version,
            input_size=exchange.input_size,
            latency_ms=latency_s * 1000,
            queue_time_ms=exchange.queue_time_ms,
            status=exchange.status,
            error=None if error is None else error.code,
            method=exchange.method,
            route=exchange.template or OTHER,
            trace_id=trace_id,
        )

    def _children_of(self, template: str, method: str, status: int) -> tuple[Counter, Histogram]:
        route = template or OTHER
        children = (self._requests(route, method, str(status)), self._durations(route))
        if len(self._children) < 4096:
            self._children[template, method, status] = children
        return children

    def log_failure(self, exchange: Exchange, error: Exception) -> None:
        """Log the cause of an `internal` error; callers are told nothing of it."""
        self._logs.say("request_failed", request_id=exchange.request_id, error=error)
