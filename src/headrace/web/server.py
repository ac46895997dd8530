"""The listener: uvicorn with its sockets, its slow clients and its end in our hands."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import socket
from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from headrace.errors import HeadraceError, InvalidRequest, TooLarge
from headrace.web.app import WHOLE, App
from headrace.web.errors import error_body

__all__ = ["CannotListen", "Listener", "probe", "run", "serve"]

T = TypeVar("T")

#: After a stop, open connections without a request stay open for so long: what was on its way gets its 503.
LAST_REQUESTS_S = 0.25
#: How long cancelled requests may take to say so.
CANCEL_S = 1.0

BACKLOG = 2048

_PHRASES = {400: b"Bad Request", 408: b"Request Timeout", 413: b"Content Too Large"}


class CannotListen(Exception):
    """The address cannot be bound; the message names address and port."""


class Listener:
    """One bound address that an application is served on, until `stop`."""

    def __init__(self, app: App, host: str, port: int) -> None:
        """Hold what to serve; nothing is bound yet."""
        self.app = app
        self.host = host
        #: The port asked for; after `start` the one that is bound.
        self.port = port
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Bind and serve. Raises CannotListen."""
        sockets = _bind(self.host, self.port)
        self.port = int(sockets[0].getsockname()[1])
        config = uvicorn.Config(
            self.app,
            http=_Protocol,
            ws="none",
            lifespan="on",
            interface="asgi3",
            log_config=None,
            # Its lines about bad requests are ours to write: one line for each, with the others' fields.
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=self.app.site.settings.idle_timeout_s,
        )
        self._server = _Server(config, self.app)
        self._serving = asyncio.create_task(self._server.serve(sockets=sockets))
        up = asyncio.create_task(self._server.up.wait())
        await asyncio.wait({up, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        up.cancel()
        if self._serving.done():
            self._serving.result()

    async def stop(self) -> None:
        """Turn not ready, stop accepting, finish what is in progress within the grace period, close.

        A second call waits for the first.
        """
        if self._server is None or self._serving is None:
            return
        self.app.site.begin_to_stop()
        self._server.should_exit = True
        await asyncio.shield(self._serving)

    async def stopped(self) -> None:
        """Return when it no longer serves, whoever ended it. Raises what ended it by accident."""
        if self._serving is not None:
            await asyncio.shield(self._serving)


async def serve(
    app: App,
    host: str,
    port: int,
    *,
    stop: asyncio.Event,
    on_listening: Callable[[str, int], object] | None = None,
) -> None:
    """Serve until `stop` is set, then end in order. Raises CannotListen.

    `on_listening` is told the address and the real port (where 0 was asked for). Signals are left alone: who
    catches them sets `stop`.
    """
    listener = Listener(app, host, port)
    await listener.start()
    try:
        if on_listening is not None:
            on_listening(host, listener.port)
        waiting = asyncio.create_task(stop.wait())
        ended = asyncio.create_task(listener.stopped())
        await asyncio.wait({waiting, ended}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
    finally:
        await listener.stop()


def probe(host: str, port: int) -> int:
    """Return the port that could be bound now, a free one where `port` is 0. Raises CannotListen."""
    sockets = _bind(host, port)
    try:
        return int(sockets[0].getsockname()[1])
    finally:
        for each in sockets:
            each.close()


def run(main: Awaitable[T]) -> T:
    """Run a service on a new event loop: uvloop's where it is installed."""
    try:
        import uvloop

        factory = uvloop.new_event_loop
    except ImportError:
        factory = None
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(_coroutine(main))


async def _coroutine(main: Awaitable[T]) -> T:
    return await main


def _bind(host: str, port: int) -> list[socket.socket]:
    """Bind every address that a name stands for, and listen."""
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            bound = socket.socket(family, kind, protocol)
            sockets.append(bound)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            # One port for all addresses of a name, also where the system was to pick it.
            number = port or (sockets[0].getsockname()[1] if len(sockets) > 1 else 0)
            try:
                bound.bind((address[0], number, *address[2:]))
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL or len(found) == 1:
                    raise
                # `localhost` may stand for ::1 on a machine without IPv6.
                sockets.remove(bound)
                bound.close()
                continue
            bound.setblocking(False)
            # With SO_REUSEADDR it may be only now that somebody else turns out to be there.
            bound.listen(BACKLOG)
        if not sockets:
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    except OSError as error:
        for each in sockets:
            each.close()
        reason = error.strerror or str(error)
        raise CannotListen(f"cannot listen on {host}:{port}: {reason.lower()}") from error
    return sockets


class _Protocol(HttpToolsProtocol):
    """uvicorn's protocol, but for what it answers by itself: that is JSON with an id, like every other error."""

    head_bytes = 0

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.head_bytes = 0

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self.scope[WHOLE] = functools.partial(self._send_whole, self.cycle)  # type: ignore[literal-required]

    def _send_whole(
        self, cycle: RequestResponseCycle, status: int, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> bool:
        """Do what two calls of `cycle.send` would do, in one write; False where the socket is not keeping up."""
        if cycle.response_started or self.flow.write_paused:
            return False
        if cycle.disconnected:
            return True
        parts = [STATUS_LINE[status]]
        for name, value in (*self.server_state.default_headers, *headers):
            parts += (name, b": ", value, b"\r\n")
            if name == b"connection":
                cycle.keep_alive = False
        if not cycle.keep_alive and headers[-1][0] != b"connection":
            parts.append(b"connection: close\r\n")
        parts += (b"\r\n", body)
        self.transport.write(b"".join(parts))
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        cycle.message_event.set()
        if not cycle.keep_alive:
            self.transport.close()
        cycle.on_response()
        return True

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            # The parser itself has no limit for a head.
            self.head_bytes += len(data)
            limit = self._web.site.settings.head_bytes_max
            if self.head_bytes > limit:
                details = {"input": "head", "limit": limit, "size": self.head_bytes}
                self.refuse(413, TooLarge(f"The request head is larger than {limit} bytes", details=details))

    def send_400_response(self, msg: str) -> None:
        self.refuse(400, InvalidRequest("This is not an HTTP request that can be read"))

    def refuse(self, status: int, error: HeadraceError) -> None:
        """Answer without an application, and close."""
        if self.transport.is_closing():
            return
        request_id = self._web.new_request_id()
        body = error_body(error, request_id, status)
        head = (
            b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"x-request-id: %s\r\nx-model-version: %s\r\nconnection: close\r\n\r\n"
        )
        version = self._web.site.shown_version().encode("ascii", "replace")
        self.transport.write(head % (status, _PHRASES[status], len(body), request_id.encode("ascii"), version) + body)
        self.transport.close()
        self._web.observe_refusal(request_id, status, error)

    @property
    def _web(self) -> App:
        app = self.config.app
        assert isinstance(app, App)
        return app


class _Server(uvicorn.Server):
    """uvicorn's server without its signals, with our order of ending and a look at connections that are silent."""

    def __init__(self, config: uvicorn.Config, app: App) -> None:
        super().__init__(config)
        self.up = asyncio.Event()
        self._app = app
        #: Connection → (its latest request and what is unsent, since when that has been so).
        self._quiet: dict[Any, tuple[Any, float]] = {}

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        # The service catches them: two handlers for one signal would each undo the other's work.
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:
            self._cut_silent_connections()
        return await super().on_tick(counter)

    def _cut_silent_connections(self) -> None:
        """End connections that never finish a request head, or never read their answer.

        uvicorn's own timer runs only between an answer and the next byte.
        """
        now_s = self._app.site.clock.monotonic_s()
        limit_s = self._app.site.settings.head_timeout_s
        quiet: dict[Any, tuple[Any, float]] = {}
        for connection in list(self.server_state.connections):
            if not isinstance(connection, _Protocol):
                continue
            cycle, transport = connection.cycle, connection.transport
            unsent = transport.get_write_buffer_size()
            working = cycle is not None and not cycle.response_complete
            idle = connection.timeout_keep_alive_task is not None and not transport.is_closing()
            if (working or idle) and not unsent:
                continue
            state = (cycle, unsent)
            before, since_s = self._quiet.get(connection, (state, now_s))
            if before != state:
                since_s = now_s
            quiet[connection] = (state, since_s)
            if now_s - since_s < limit_s:
                continue
            if unsent or transport.is_closing():
                transport.abort()
            elif connection.head_bytes:
                connection.refuse(408, InvalidRequest("The request head did not arrive in time"))
            else:
                transport.close()
        self._quiet = quiet

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        app, clock = self._app, self._app.site.clock
        settings = app.site.settings
        app.site.begin_to_stop()
        if settings.drain_s:
            await clock.sleep(settings.drain_s)
        app.site.refusing = True
        for server in self.servers:
            server.close()
        for each in sockets or []:
            each.close()
        await app.finish(settings.grace_s)
        if self.server_state.connections:
            await clock.sleep(LAST_REQUESTS_S)
        app.cancel_all()
        await app.finish(CANCEL_S)
        for connection in list(self.server_state.connections):
            connection.shutdown()
        # A turn of the loop lets closed transports flush; what does not flush then is cut.
        await clock.sleep(0.02)
        for connection in list(self.server_state.connections):
            if isinstance(connection, _Protocol):
                connection.transport.abort()
        await self.lifespan.shutdown()
