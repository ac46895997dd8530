"""The dispatcher: limits, ids, errors and the access log around one table of routes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import quote

from headrace.clock import Clock
from headrace.errors import (
    Cancelled,
    HeadraceError,
    Internal,
    InvalidRequest,
    MethodNotAllowed,
    NotReady,
    RequestNotFound,
)
from headrace.models.statistics import Statistics
from headrace.services.door import Door
from headrace.telemetry.exposition import Exposition
from headrace.telemetry.logs import Logs
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.trace import Tracer
from headrace.web import docs, health, oip, predict, requests, tfserving, torchserve, triton
from headrace.web.compress import compressed
from headrace.web.errors import error_answer
from headrace.web.exchange import Answer, Bodies, ClientGone, Exchange, Receive, Scope, Send
from headrace.web.headers import legal_request_id
from headrace.web.routes import Doc, Route, Router
from headrace.web.settings import WebSettings
from headrace.web.site import Site

__all__ = ["ROUTES", "WHOLE", "App", "WebSettings", "create_app"]

#: Where a scope may carry a function that sends a whole answer at once: (status, headers, body) → whether it did.
#: ASGI's two messages are two writes, and so two packets; our own listener saves one of them.
WHOLE = "headrace.whole"

#: How often requests in progress are looked at: for slow senders, and for clients that have gone.
SWEEP_S = 0.25
#: What is read and thrown away after an early refusal, so that the client gets to see the answer.
LINGER_BYTES_MAX = 4 * 1024 * 1024
LINGER_S_MAX = 2.0
#: An unread body up to this size does not cost the client its connection.
UNREAD_BYTES_KEPT = 16 * 1024

#: Everything that is served on the data listener, but for the pages that describe it.
ROUTES: tuple[Route, ...] = (
    *predict.ROUTES,
    *oip.ROUTES,
    *triton.ROUTES,
    *tfserving.ROUTES,
    *torchserve.ROUTES,
    *requests.ROUTES,
    *health.ROUTES,
)

_ALWAYS_SERVED = {"/v2/health/live", "/v2/health/ready", "/health", "/metrics", "/ping"}


def create_app(
    door: Door,
    settings: WebSettings,
    metrics: Metrics,
    logs: Logs,
    clock: Clock,
    *,
    tracer: Tracer | None = None,
    scrape: Callable[[], Awaitable[bytes]] | None = None,
    more: Sequence[Route] = (),
    statistics: Callable[[str, str], Statistics | None] | None = None,
    rows_max: int = 0,
) -> App:
    """Return the application of the data listener.

    `scrape` renders /metrics where siblings' numbers belong in it too; by default it is this process's own.
    `more` are routes of other protocols. `statistics` finds those of a version that runs in this process, and
    `rows_max` is the most rows run together.
    """
    exposition = Exposition(metrics, clock)

    async def own() -> bytes:
        return exposition.render()

    routes = (*ROUTES, *more)
    site = Site(
        door,
        settings,
        metrics,
        logs,
        clock,
        tracer or Tracer(clock),
        scrape or own,
        statistics=statistics,
        rows_max=rows_max,
    )
    app = App(site, (*routes, *docs.routes_of_documents(routes)))
    metrics.gauge("headrace_http_in_flight")().read = lambda: float(len(app.inflight))
    return app


class App:
    """An ASGI application over a door."""

    def __init__(self, site: Site, routes: Sequence[Route]) -> None:
        """Hold the table."""
        self.site = site
        self.router = Router(routes)
        self.inflight: set[Exchange] = set()
        self._settings = site.settings
        self._bodies = Bodies(site.settings.bodies_bytes_max)
        self._tracing = site.tracer.enabled
        self._monotonic_s = site.clock.monotonic_s
        self._idle: asyncio.Event | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._id_prefix = secrets.token_hex(8)
        self._id_counter = itertools.count(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection scope."""
        if scope["type"] != "http":
            await self._lifespan(scope, receive, send)
            return
        exchange = self.enter(scope, receive)
        try:
            answer = await self._answer(exchange)
            if answer is None:
                exchange.status = 499
            elif answer.stream is not None:
                await self._send_stream(exchange, answer, send)
            else:
                await self._send(exchange, answer, send)
        finally:
            self.leave(exchange)

    def enter(self, scope: Scope, receive: Receive) -> Exchange:
        """Begin a request of the current task, whichever protocol it came by; `leave` has to end it."""
        exchange = Exchange(scope, receive, self._settings, self._bodies, self._monotonic_s())
        exchange.request_id = legal_request_id(exchange.headers.get(b"x-request-id")) or self.new_request_id()
        exchange.task = asyncio.current_task()
        if self._tracing or b"traceparent" in exchange.headers:
            self.site.begin_trace(exchange)
        self.inflight.add(exchange)
        return exchange

    def leave(self, exchange: Exchange) -> None:
        """End a request: it is counted and logged, unless that was done, and what it held is given back."""
        self.inflight.discard(exchange)
        if self._idle is not None and not self.inflight:
            self._idle.set()
        if exchange.watcher is not None:
            exchange.watcher.cancel()
        if not exchange.finished_s:
            self.answered(exchange)
        # An error holds its frames and they this exchange: broken up here, nothing is left for the collector.
        exchange.error = None
        exchange.scope.pop(WHOLE, None)
        if exchange.held:
            self._bodies.give_back(exchange.held, self._monotonic_s() - exchange.started_s)

    def new_request_id(self) -> str:
        """Return an id that no other request of any process has; legal as X-Request-Id."""
        return f"{self._id_prefix}-{next(self._id_counter):x}"

    # -- finding the answer -----------------------------------------------------------------------------

    async def _answer(self, exchange: Exchange) -> Answer | None:
        """Return the answer, an error's too; None where nobody is there to read it."""
        try:
            route = self._route(exchange)
            return await compressed(exchange, await route.handler(self.site, exchange))
        except HeadraceError as error:
            exchange.error = error
            return error_answer(error, exchange.request_id)
        except ClientGone:
            exchange.error = Cancelled("The client closed the connection")
            return None
        except asyncio.CancelledError:
            return self._interrupted(exchange)
        except Exception as error:
            self.site.log_failure(exchange, error)
            exchange.error = Internal()
            return error_answer(exchange.error, exchange.request_id)

    def _route(self, exchange: Exchange) -> Route:
        scope = exchange.scope
        match = self.router.find(scope.get("raw_path") or quote(scope["path"]).encode("ascii"))
        if match is None:
            if scope["path"] == "*" and exchange.method == "OPTIONS":
                return _SERVER_OPTIONS
            raise RequestNotFound("There is nothing at this path")
        exchange.template = match.template
        exchange.params = match.params
        if self.site.refusing and match.template not in _ALWAYS_SERVED:
            raise NotReady("The service is stopping")
        route = match.methods.get(exchange.method)
        if route is not None:
            exchange.kind = route.kind
            return route
        if exchange.method == "HEAD" and "GET" in match.methods:
            return match.methods["GET"]
        exchange.extra_headers = ((b"allow", match.allow),)
        if exchange.method == "OPTIONS":
            return _SERVER_OPTIONS
        raise MethodNotAllowed(
            "The method is not allowed here", details={"expected": match.allow.decode("ascii").split(", ")}
        )

    def _interrupted(self, exchange: Exchange) -> Answer | None:
        """Answer a request whose task was cancelled: by the sweeper, or by the end of the grace period."""
        if exchange.task is not None:
            exchange.task.uncancel()
        if exchange.stopped == "gone":
            exchange.error = Cancelled("The client closed the connection")
            return None
        if exchange.stopped == "slow":
            allowed_s = self._settings.body_timeout_s
            exchange.error = InvalidRequest(
                "The body did not arrive in time",
                details={"input": "body", "expected": f"all of it within {allowed_s:g} s, or steady progress"},
            )
            return error_answer(exchange.error, exchange.request_id, 408)
        exchange.error = NotReady("The service is stopping")
        return error_answer(exchange.error, exchange.request_id)

    # -- sending it -------------------------------------------------------------------------------------

    def _headers(self, exchange: Exchange, answer: Answer) -> list[tuple[bytes, bytes]]:
        version = exchange.model_version or self.site.shown_version()
        headers = [
            (b"x-request-id", exchange.request_id.encode("ascii")),
            (b"x-model-version", version.encode("ascii", "replace")),
            *answer.headers,
            *exchange.extra_headers,
        ]
        if exchange.location:
            headers.append((b"location", exchange.location.encode("ascii")))
        return headers

    async def _send(self, exchange: Exchange, answer: Answer, send: Send) -> None:
        unread = exchange.body_is_unread
        exchange.stage = "send"
        exchange.status = answer.status
        span = None
        if exchange.span is not None and self._tracing:
            span = self.site.tracer.span("response_sent", exchange.span.context, status=answer.status)
        headers = self._headers(exchange, answer)
        if answer.status != 204:
            headers += [(b"content-type", answer.content_type), (b"content-length", b"%d" % len(answer.body))]
        closing = unread and not _may_stay(exchange)
        if closing or self.site.draining or exchange.stopped:
            headers.append((b"connection", b"close"))
        body = b"" if exchange.method == "HEAD" else answer.body
        whole = exchange.scope.get(WHOLE)
        if whole is not None and not closing and whole(answer.status, headers, body):
            self.answered(exchange)
        else:
            await send({"type": "http.response.start", "status": answer.status, "headers": headers})
            self.answered(exchange)
            if closing and not exchange.stopped and b"expect" not in exchange.headers:
                # Closing while the client still sends would reset the connection and destroy the answer under way.
                await send({"type": "http.response.body", "body": body, "more_body": True})
                await _discard(exchange.receive)
                body = b""
            await send({"type": "http.response.body", "body": body})
        if span is not None:
            span.end()

    async def _send_stream(self, exchange: Exchange, answer: Answer, send: Send) -> None:
        assert answer.stream is not None
        exchange.status = answer.status
        headers = [*self._headers(exchange, answer), (b"content-type", answer.content_type)]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        try:
            if exchange.method != "HEAD":
                async for piece in answer.stream:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        except Exception as error:
            self.site.log_failure(exchange, error)
        except asyncio.CancelledError:
            # The answer has begun, so that there is no other way to say it than to end.
            if exchange.task is not None:
                exchange.task.uncancel()
        exchange.stage = "send"
        await send({"type": "http.response.body", "body": b""})

    def answered(self, exchange: Exchange) -> None:
        """Count and log a request whose answer goes out now; once for each."""
        exchange.finished_s = self._monotonic_s()
        self.site.observe(exchange)

    # -- looking after what is in progress --------------------------------------------------------------

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            raise RuntimeError(f"an ASGI scope of type {scope['type']} is not served here")
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                self.begin()
                await send({"type": "lifespan.startup.complete"})
            else:
                self.end()
                await send({"type": "lifespan.shutdown.complete"})
                return

    def begin(self) -> None:
        """Begin to look after requests in progress."""
        self._sweeper = asyncio.create_task(self._sweep_for_ever())

    def end(self) -> None:
        """Look after nothing any more."""
        if self._sweeper is not None:
            self._sweeper.cancel()

    async def finish(self, within_s: float) -> None:
        """Return when no request is in progress, at the latest after `within_s`."""
        if not self.inflight:
            return
        self._idle = asyncio.Event()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._idle.wait()

    def cancel_all(self) -> None:
        """End every request in progress: those that wait are told that the service is stopping."""
        for exchange in list(self.inflight):
            if exchange.task is not None:
                exchange.task.cancel()

    def observe_refusal(self, request_id: str, status: int, error: HeadraceError) -> None:
        """Count and log an answer that the listener gave by itself: there was no request to speak of."""
        scope: Scope = {"method": "", "headers": []}
        exchange = Exchange(scope, _nothing, self._settings, self._bodies, self._monotonic_s())
        exchange.request_id, exchange.status, exchange.error = request_id, status, error
        self.answered(exchange)

    async def _sweep_for_ever(self) -> None:
        while True:
            await self.site.clock.sleep(SWEEP_S)
            self.sweep()

    def sweep(self) -> None:
        """Cut slow senders, and begin to watch the connections of those who wait for long.

        Done for all at once because a timer or a watching task for every request would cost more than most
        requests do.
        """
        now_s = self._monotonic_s()
        settings = self._settings
        for exchange in list(self.inflight):
            age_s = now_s - exchange.started_s
            if exchange.stage == "body":
                if age_s > settings.body_timeout_s + exchange.bytes_seen / settings.body_bytes_per_s_min:
                    exchange.stop("slow")
            elif exchange.stage == "work" and exchange.watcher is None and age_s >= SWEEP_S:
                exchange.watcher = asyncio.create_task(_watch(exchange))


async def _nothing() -> dict[str, str]:
    return {"type": "http.disconnect"}


async def _options(site: Site, exchange: Exchange) -> Answer:
    return Answer(status=204)


_SERVER_OPTIONS = Route("OPTIONS", "*", _options, Doc("What is possible here"))


async def _watch(exchange: Exchange) -> None:
    while True:
        message = await exchange.receive()
        if message["type"] == "http.disconnect":
            if exchange.stage == "work":
                exchange.stop("gone")
            return


async def _discard(receive: Receive) -> None:
    left = LINGER_BYTES_MAX
    try:
        async with asyncio.timeout(LINGER_S_MAX):
            while left > 0:
                message = await receive()
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
                left -= len(message.get("body", b""))
    except TimeoutError:
        return


def _may_stay(exchange: Exchange) -> bool:
    """Return whether what is unread is worth reading past: little, and sure to come."""
    declared = exchange.headers.get(b"content-length", b"")
    return declared.isdigit() and int(declared) <= UNREAD_BYTES_KEPT and b"expect" not in exchange.headers
