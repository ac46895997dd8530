"""One request over one connection, as ASGI sees it, and its answer's bytes (RFC 9112)."""

from __future__ import annotations

import asyncio
import http
from collections.abc import MutableMapping
from typing import Any, Protocol

from headrace.errors import HeadraceError, Internal
from headrace.web.app import App

__all__ = ["STATUS_LINES", "Cycle", "Wire"]

STATUS_LINES = {status.value: b"HTTP/1.1 %d %s\r\n" % (status, status.phrase.encode()) for status in http.HTTPStatus}
_BODILESS = (204, 304)
_DISCONNECT = {"type": "http.disconnect"}


class Wire(Protocol):
    """What a cycle needs of its connection."""

    transport: asyncio.Transport
    #: None while the socket takes what is written; else set when it does again.
    writable: asyncio.Event | None

    @property
    def date(self) -> bytes:
        """Return what follows every status line."""

    def resume_reading(self) -> None:
        """Read again."""

    def done(self, cycle: Cycle) -> None:
        """Go on after an answer."""

    def refuse(self, status: int, error: HeadraceError) -> None:
        """Answer without an application, and close."""


class Cycle:
    """One request and its answer: `receive` and `send` of ASGI's HTTP 2.3, and a shorter way for whole answers."""

    __slots__ = (
        "answered",
        "begun",
        "chunked",
        "complete",
        "connection",
        "event",
        "gone",
        "is_1_0",
        "is_expecting",
        "is_head",
        "keep_alive",
        "left",
        "pieces",
        "scope",
        "started",
        "task",
        "told",
        "unread",
    )

    def __init__(self, connection: Wire) -> None:
        self.connection = connection
        self.scope: dict[str, Any] | None = None
        self.task: asyncio.Task[None] | None = None
        self.is_1_0 = self.is_head = self.is_expecting = False
        self.keep_alive = True
        #: What of the body came and was not received, and how long it is.
        self.pieces: list[bytes] = []
        self.unread = 0
        #: All of it has come; the application has been told so.
        self.complete = self.told = False
        #: It has its task or waits for its turn.
        self.begun = False
        self.started = self.answered = self.gone = False
        self.chunked = False
        #: Bytes that the answer still owes; None: its end is told by chunks or by closing.
        self.left: int | None = None
        self.event: asyncio.Event | None = None

    async def run(self, app: App) -> None:
        """Be answered by the application, which does not raise; if it does, the connection ends."""
        scope, self.scope = self.scope, None
        assert scope is not None
        try:
            await app(scope, self.receive, self.send)
        finally:
            if not self.answered and not self.gone:
                if not self.started:
                    self.connection.refuse(500, Internal())
                self.connection.transport.close()

    def take(self, piece: bytes) -> None:
        """Keep a piece of the body."""
        self.pieces.append(piece)
        self.unread += len(piece)
        self.wake()

    def lose(self) -> None:
        """Note that nobody is there any more."""
        if not self.answered:
            self.gone = True
            self.wake()

    def wake(self) -> None:
        """Let `receive` look again."""
        if self.event is not None:
            self.event.set()

    async def receive(self) -> MutableMapping[str, Any]:
        """Return the next piece of the body, or `http.disconnect` once there is nobody or the answer is sent."""
        while True:
            if self.gone or self.answered:
                return _DISCONNECT
            if self.pieces or (self.complete and not self.told):
                pieces = self.pieces
                body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
                self.pieces, self.unread, self.told = [], 0, self.complete
                return {"type": "http.request", "body": body, "more_body": not self.complete}
            if not self.told:
                self._invite()
                self.connection.resume_reading()
            if self.event is None:
                self.event = asyncio.Event()
            self.event.clear()
            await self.event.wait()

    def _invite(self) -> None:
        """Say that the body may come, to a client that asked (RFC 9110, 10.1.1)."""
        if self.is_expecting and not self.started:
            self.connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.is_expecting = False

    def send_whole(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> bool:
        """Send an answer in one write; return False where the socket is not keeping up."""
        connection = self.connection
        if self.started or connection.writable is not None:
            return False
        if self.gone:
            return True
        parts = [STATUS_LINES[status], connection.date]
        for name, value in headers:
            parts += (name, b": ", value, b"\r\n")
        if headers[-1] == (b"connection", b"close"):
            self.keep_alive = False
        elif not self.keep_alive:
            parts.append(b"connection: close\r\n")
        parts += (b"\r\n", body)
        connection.transport.write(b"".join(parts))
        self._done()
        return True

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Send the head of an answer, or a piece of its body; waits while the client does not read."""
        writable = self.connection.writable
        if writable is not None:
            await writable.wait()
        if self.gone or self.answered:
            return
        if message["type"] == "http.response.start":
            self._send_head(message["status"], message["headers"])
        else:
            self._send_piece(message.get("body", b""), message.get("more_body", False))

    def _send_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.started = True
        parts = [STATUS_LINES[status], self.connection.date]
        told_to_close = False
        for name, value in headers:
            parts += (name, b": ", value, b"\r\n")
            if name == b"content-length":
                self.left = int(value)
            elif name == b"connection":
                told_to_close, self.keep_alive = True, False
        if self.is_head or status in _BODILESS:
            self.left = 0
        elif self.left is None and self.is_1_0:
            self.keep_alive = False
        elif self.left is None:
            self.chunked = True
            parts.append(b"transfer-encoding: chunked\r\n")
        if not self.keep_alive and not told_to_close:
            parts.append(b"connection: close\r\n")
        parts.append(b"\r\n")
        self.connection.transport.write(b"".join(parts))

    def _send_piece(self, body: bytes, more: bool) -> None:
        transport = self.connection.transport
        if self.chunked and not self.is_head:
            pieces = [b"%x\r\n" % len(body), body, b"\r\n"] if body else []
            if not more:
                pieces.append(b"0\r\n\r\n")
            if pieces:
                transport.write(b"".join(pieces))
        elif body and not self.is_head:
            if self.left is not None:
                self.left -= len(body)
            transport.write(body)
        if more:
            return
        if self.left:
            # Half an answer must not be taken for a whole one.
            self.keep_alive = False
        self._done()

    def _done(self) -> None:
        self.started = self.answered = True
        self.pieces = []
        self.wake()
        self.connection.done(self)
