"""One HTTP/1.1 connection, from httptools' parser to the application and back.

It does what is the same for every request and nothing else: one task a request, one write an answer, no timer for
either. What needs time (silent, slow and idle connections) is looked at by the listener for all of them at once.
RFC 9112 for the framing; pipelined requests are answered one after the other, in order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import cast
from urllib.parse import unquote

import httptools

from headrace.errors import HeadraceError, InvalidRequest, TooLarge
from headrace.web.app import WHOLE, App
from headrace.web.cycle import STATUS_LINES, Cycle
from headrace.web.errors import error_body

__all__ = ["Connection", "Connections"]

#: Unread bytes of a body above which nothing more is read from the socket.
UNREAD_BYTES_MAX = 64 * 1024

_METHODS = {name.encode(): name for name in ("GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH")}


class Connections:
    """The open connections of a listener, and what they share."""

    def __init__(self, app: App) -> None:
        """Begin with none."""
        self.app = app
        self.open: set[Connection] = set()
        #: `date: …\\r\\n`, renewed by the listener.
        self.date = b""
        self.loop = asyncio.get_running_loop()

    def make(self) -> Connection:
        """Return the protocol of a connection that was just accepted."""
        return Connection(self)


class Connection(asyncio.Protocol):
    """What came and what goes over one socket."""

    __slots__ = (
        "_head",
        "_headers",
        "_hosts",
        "_is_expecting",
        "_ours",
        "_parser",
        "_reading",
        "_reading_paused",
        "_target",
        "_waiting",
        "active",
        "answered",
        "quiet",
        "quiet_since_s",
        "transport",
        "writable",
    )

    def __init__(self, ours: Connections) -> None:
        """Wait for `connection_made`."""
        self._ours = ours
        self._parser = _parser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._target = b""
        self._is_expecting = False
        self._hosts = 0
        #: Bytes of a head that is not complete yet.
        self._head = 0
        #: The request that the parser is in; None between two.
        self._reading: Cycle | None = None
        self._waiting: deque[Cycle] = deque()
        self._reading_paused = False
        #: The request that is being answered.
        self.active: Cycle | None = None
        #: How many have been.
        self.answered = 0
        self.transport: asyncio.Transport
        #: None while the socket takes what is written; else set when it does again.
        self.writable: asyncio.Event | None = None
        #: For the listener: what it saw when it last looked, and since when that is so.
        self.quiet: tuple[object, ...] = ()
        self.quiet_since_s = 0.0

    @property
    def is_between(self) -> bool:
        """Return whether it was used and nothing of another request has come."""
        return self.active is None and self._reading is None and not self._head and self.answered > 0

    @property
    def date(self) -> bytes:
        """Return what follows every status line."""
        return self._ours.date

    @property
    def has_begun(self) -> bool:
        """Return whether part of a request head is here."""
        return self._head > 0

    # -- called by the transport ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self.transport = cast(asyncio.Transport, transport)
        self._ours.open.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever still works for it."""
        self._ours.open.discard(self)
        for request in (self.active, self._reading, *self._waiting):
            if request is not None:
                request.lose()
        self._waiting.clear()
        self.resume_writing()
        del self._parser  # it refers to us

    def pause_writing(self) -> None:
        """Note that the client does not read as fast as we write."""
        self.writable = asyncio.Event()

    def resume_writing(self) -> None:
        """Let the next piece go."""
        if self.writable is not None:
            self.writable.set()
            self.writable = None

    def data_received(self, data: bytes) -> None:
        """Parse, and begin what can begin."""
        if self._reading is None:
            self._head += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # What we do not offer is served as plain HTTP; the parser would take what follows for something else.
            self._parser = _parser(self)
            rest = data[upgrade.args[0] :] if upgrade.args else b""
            if rest:
                self.data_received(rest)
        except httptools.HttpParserError:
            self.refuse(400, InvalidRequest("This is not an HTTP request that can be read"))
            return
        reading = self._reading
        if reading is not None:
            if not reading.begun:
                self._begin(reading)
            if reading.unread > UNREAD_BYTES_MAX and not reading.answered:
                self.pause_reading()
        elif self._head > (limit := self._ours.app.site.settings.head_bytes_max):
            # The parser itself has no limit for a head.
            details = {"input": "head", "limit": limit, "size": self._head}
            self.refuse(413, TooLarge(f"The request head is larger than {limit} bytes", details=details))

    # -- called by the parser ---------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Begin a head."""
        self._headers = []
        self._target = b""
        self._is_expecting = False
        self._hosts = 0

    def on_url(self, url: bytes) -> None:
        """Take a piece of the target."""
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        name = name.lower()
        if self._reading is not None:
            return  # a trailer, of which we know none
        if name == b"host":
            self._hosts += 1
        elif name == b"expect" and value.lower() == b"100-continue":
            self._is_expecting = True
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Make the request."""
        self._head = 0
        parser = self._parser
        method = parser.get_method()
        target = self._target
        if not target.startswith(b"/"):
            parsed = httptools.parse_url(target)
            raw_path, query = parsed.path, parsed.query or b""
        else:
            raw_path, _, query = target.partition(b"#")[0].partition(b"?")
        path = raw_path.decode("ascii")
        self._reading = request = Cycle(self)
        request.is_1_0 = parser.get_http_version() == "1.0"
        if self._hosts != 1 and not (request.is_1_0 and self._hosts == 0):
            # RFC 9112, 3.2. Raised through the parser, which stops at it.
            raise ValueError("a request has one Host")
        request.keep_alive = not request.is_1_0 and parser.should_keep_alive()
        request.is_head = method == b"HEAD"
        request.is_expecting = self._is_expecting
        request.scope = {
            "type": "http",
            "http_version": "1.0" if request.is_1_0 else "1.1",
            "method": _METHODS.get(method) or method.decode("ascii"),
            "scheme": "http",
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": query,
            "headers": self._headers,
            WHOLE: request.send_whole,
        }

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        request = self._reading
        if request is not None and not request.answered:
            request.take(body)

    def on_message_complete(self) -> None:
        """Let it be answered."""
        request, self._reading = self._reading, None
        if request is not None and not request.answered:
            request.complete = True
            request.wake()
            if not request.begun:
                self._begin(request)

    # -- one after the other ----------------------------------------------------------------------------

    def _begin(self, request: Cycle) -> None:
        request.begun = True
        if self.active is not None:
            self._waiting.append(request)
            self.pause_reading()
            return
        self.active = request
        request.task = self._ours.loop.create_task(request.run(self._ours.app))

    def pause_reading(self) -> None:
        """Let the client's bytes wait in the kernel."""
        if not self._reading_paused and not self.transport.is_closing():
            self._reading_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again."""
        if self._reading_paused and not self.transport.is_closing():
            self._reading_paused = False
            self.transport.resume_reading()

    def done(self, cycle: Cycle) -> None:
        """Go on after an answer."""
        self.active = None
        self.answered += 1
        if not cycle.keep_alive:
            self.transport.close()
            return
        if self.transport.is_closing():
            return
        self.resume_reading()
        if self._waiting:
            following = self._waiting.popleft()
            self.active = following
            following.task = self._ours.loop.create_task(following.run(self._ours.app))

    # -- ending it --------------------------------------------------------------------------------------

    def refuse(self, status: int, error: HeadraceError) -> None:
        """Answer without an application, as an error like every other, and close."""
        if self.transport.is_closing():
            return
        app = self._ours.app
        request_id = app.new_request_id()
        body = error_body(error, request_id, status)
        version = app.site.shown_version().encode("ascii", "replace")
        head = (
            b"%s%scontent-type: application/json\r\ncontent-length: %d\r\n"
            b"x-request-id: %s\r\nx-model-version: %s\r\nconnection: close\r\n\r\n"
        )
        values = (STATUS_LINES[status], self._ours.date, len(body), request_id.encode("ascii"), version)
        self.transport.write(head % values + body)
        self.transport.close()
        app.observe_refusal(request_id, status, error)

    def end(self) -> None:
        """Close now where nothing is in progress, else after the answer."""
        if self.active is None:
            self.transport.close()
        else:
            self.active.keep_alive = False


def _parser(connection: Connection) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(connection)
    # Bytes after a request that says `connection: close` are dropped, instead of spoiling its answer.
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser
