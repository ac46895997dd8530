"""The listener: bound addresses, what is silent or slow on them, and an end in order."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Awaitable, Callable
from email.utils import formatdate
from typing import Protocol, TypeVar

from headrace.errors import InvalidRequest
from headrace.web.app import App
from headrace.web.connection import Connection, Connections

__all__ = ["CannotListen", "Companion", "Listener", "probe", "run", "serve"]

T = TypeVar("T")

#: After a stop, open connections without a request stay open for so long: what was on its way gets its 503.
LAST_REQUESTS_S = 0.25
#: How long cancelled requests may take to say so.
CANCEL_S = 1.0

#: How often connections are looked at.
LOOK_S = 0.5

BACKLOG = 2048


class CannotListen(Exception):
    """The address cannot be bound; the message names address and port."""


class Companion(Protocol):
    """A listener of another protocol for the same application; its requests are among those in progress."""

    def close(self) -> None:
        """Begin no long work any more; the application refuses by now what is new."""

    async def end(self) -> None:
        """End what is left after the grace period."""


class Listener:
    """One bound address that an application is served on, until `stop`."""

    def __init__(self, app: App, host: str, port: int) -> None:
        """Hold what to serve; nothing is bound yet."""
        self.app = app
        self.host = host
        #: The port asked for; after `start` the one that is bound.
        self.port = port
        self._connections: Connections
        #: Another protocol's listener, which stops when this one does.
        self.companion: Companion | None = None
        self._servers: list[asyncio.Server] = []
        self._looking: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()

    async def start(self) -> None:
        """Bind and serve. Raises CannotListen."""
        sockets = _bind(self.host, self.port)
        self.port = int(sockets[0].getsockname()[1])
        loop = asyncio.get_running_loop()
        self._connections = Connections(self.app)
        self._renew_date()
        self.app.begin()
        for each in sockets:
            self._servers.append(await loop.create_server(self._connections.make, sock=each, backlog=BACKLOG))
        self._looking = asyncio.create_task(self._look_for_ever())

    async def stop(self) -> None:
        """Turn not ready, stop accepting, finish what is in progress within the grace period, close.

        A second call waits for the first.
        """
        if self._looking is None:
            return
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        await asyncio.shield(self._stopping)

    async def stopped(self) -> None:
        """Return when it no longer serves, whoever ended it. Raises what ended it by accident."""
        if self._looking is not None:
            ended = asyncio.create_task(self._stopped.wait())
            await asyncio.wait({ended, self._looking}, return_when=asyncio.FIRST_COMPLETED)
            ended.cancel()
            if self._looking.done() and not self._looking.cancelled():
                self._looking.result()

    async def _stop(self) -> None:
        app, clock, connections = self.app, self.app.site.clock, self._connections.open
        settings = app.site.settings
        app.site.begin_to_stop()
        if settings.drain_s:
            await clock.sleep(settings.drain_s)
        app.site.refusing = True
        for server in self._servers:
            server.close()
        if self.companion is not None:
            self.companion.close()
        await app.finish(settings.grace_s)
        if connections:
            await clock.sleep(LAST_REQUESTS_S)
        app.cancel_all()
        await app.finish(CANCEL_S)
        for connection in list(connections):
            connection.end()
        if self.companion is not None:
            await self.companion.end()
        # A turn of the loop lets closed transports flush; what does not flush then is cut.
        await clock.sleep(0.02)
        for connection in list(connections):
            connection.transport.abort()
        app.end()
        assert self._looking is not None
        self._looking.cancel()
        self._stopped.set()

    async def _look_for_ever(self) -> None:
        clock = self.app.site.clock
        while True:
            await clock.sleep(LOOK_S)
            self._renew_date()
            now_s = clock.monotonic_s()
            for connection in list(self._connections.open):
                self._look_at(connection, now_s)

    def _renew_date(self) -> None:
        # RFC 9110, 6.6.1: to the second, and so not for each answer.
        now_s = self.app.site.clock.now_ms() // 1000
        self._connections.date = b"date: %s\r\n" % formatdate(now_s, usegmt=True).encode("ascii")

    def _look_at(self, connection: Connection, now_s: float) -> None:
        """End a connection that never finishes a request head, never reads its answer, or is not used any more.

        Done for all at once: a timer for each request would cost as much as parsing it.
        """
        settings, transport = self.app.site.settings, connection.transport
        unsent = transport.get_write_buffer_size()
        if connection.active is not None and not unsent:
            return
        state = (connection.active, connection.answered, connection.has_begun, unsent)
        if connection.quiet != state:
            connection.quiet, connection.quiet_since_s = state, now_s
            return
        idle = connection.is_between and not unsent and not transport.is_closing()
        if now_s - connection.quiet_since_s < (settings.idle_timeout_s if idle else settings.head_timeout_s):
            return
        if unsent or transport.is_closing():
            transport.abort()
        elif connection.has_begun:
            connection.refuse(408, InvalidRequest("The request head did not arrive in time"))
        else:
            transport.close()


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
