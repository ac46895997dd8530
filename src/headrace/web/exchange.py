"""One request and its answer: the body read within its limits, and what the access log will say."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any
from urllib.parse import parse_qsl

from headrace.errors import HeadraceError, InvalidRequest, Overloaded, TooLarge, UnsupportedMediaType
from headrace.telemetry.trace import Span
from headrace.web.settings import WebSettings

__all__ = ["Answer", "Bodies", "ClientGone", "Exchange", "Receive", "Scope", "Send", "inflate", "too_large"]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

#: Bodies above this are inflated on a thread, so that a bomb does not hold up the event loop.
INFLATE_INLINE_MAX = 64 * 1024
#: Bodies up to this are not counted among those that are held.
HELD_UNCOUNTED_MAX = 64 * 1024
_INFLATE_STEP = 1024 * 1024
_READ_STEP = 16 * 1024
#: Blocks of 64 KiB, as some writers make, fill the largest body with half as many.
MEMBERS_MAX = 65_536
_WINDOW = {b"gzip": zlib.MAX_WBITS | 16, b"x-gzip": zlib.MAX_WBITS | 16, b"deflate": zlib.MAX_WBITS}


_NO_PARAMS: Mapping[str, str] = {}


class ClientGone(Exception):
    """The client closed the connection before it had its answer."""


class Answer:
    """What goes back: a whole body, or a stream of pieces."""

    __slots__ = ("body", "content_type", "headers", "status", "stream")

    def __init__(
        self,
        body: bytes = b"",
        *,
        status: int = 200,
        content_type: bytes = b"application/json",
        headers: Sequence[tuple[bytes, bytes]] = (),
        stream: AsyncIterator[bytes] | None = None,
    ) -> None:
        """Hold an answer; `headers` are those beyond content type and length, ids and versions."""
        self.body = body
        self.status = status
        self.content_type = content_type
        self.headers = headers
        self.stream = stream


class Bodies:
    """The memory that long bodies take together: a thousand of the longest must not be more than a machine has."""

    __slots__ = ("_held_s", "held", "limit")

    def __init__(self, limit: int) -> None:
        """Hold nothing; `limit` is in bytes, for all of them."""
        self.limit = limit
        self.held = 0
        #: How long one is held, smoothed: after that there is room for another.
        self._held_s = 1.0

    def take(self, size: int) -> None:
        """Hold `size` more bytes. Raises Overloaded with the time that a body is usually held."""
        if self.held + size > self.limit:
            raise Overloaded(
                "The bodies of other requests take all the memory there is for them",
                details={"held": self.held, "limit": self.limit},
                retry_after_s=self._held_s,
            )
        self.held += size

    def give_back(self, size: int, held_s: float) -> None:
        """Let go of what a request that lasted `held_s` held."""
        self.held -= size
        self._held_s += (held_s - self._held_s) / 8


class Exchange:
    """One request on its way through; its slots are what the log line and the metrics are made of."""

    __slots__ = (
        "bodies",
        "bytes_seen",
        "deadline_s",
        "error",
        "extra_headers",
        "finished_s",
        "headers",
        "held",
        "input_size",
        "kind",
        "location",
        "method",
        "model",
        "model_version",
        "params",
        "queue_time_ms",
        "receive",
        "request_id",
        "scope",
        "settings",
        "span",
        "stage",
        "started_s",
        "status",
        "stopped",
        "task",
        "template",
        "watcher",
    )

    def __init__(self, scope: Scope, receive: Receive, settings: WebSettings, bodies: Bodies, started_s: float) -> None:
        """Begin; nothing is read yet."""
        self.bodies = bodies
        #: What of `bodies` is this one's.
        self.held = 0
        self.scope = scope
        self.receive = receive
        self.settings = settings
        self.started_s = started_s
        self.finished_s = 0.0
        self.method: str = scope["method"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.request_id = ""
        #: The route's template, for labels; "" where no route matched.
        self.template = ""
        self.kind = ""
        self.params: Mapping[str, str] = _NO_PARAMS
        self.model = ""
        self.model_version = ""
        self.queue_time_ms: float | None = None
        #: Bytes of the body after decompression.
        self.input_size = 0
        self.status = 0
        self.error: HeadraceError | None = None
        #: Where an accepted request's result will be: `/requests/{id}`.
        self.location = ""
        self.extra_headers: tuple[tuple[bytes, bytes], ...] = ()
        self.span: Span | None = None
        #: Seconds from the start after which the protocol itself gives up (gRPC); None where it never does.
        self.deadline_s: float | None = None
        #: "head" (nothing read), "body" (reading it), "work" (it is all here), "send"; "call" where another
        #: protocol reads the body and says when the caller has gone.
        self.stage = "head"
        self.bytes_seen = 0
        #: Why the sweeper ended it: "gone" or "slow"; "" if it did not.
        self.stopped = ""
        self.task: asyncio.Task[Any] | None = None
        self.watcher: asyncio.Task[None] | None = None

    def every(self, name: bytes) -> list[bytes]:
        """Return all values of a repeatable header, in order."""
        if name not in self.headers:
            return []
        return [value for key, value in self.scope["headers"] if key == name]

    def query(self) -> dict[str, str]:
        """Return the query's parameters. Raises InvalidRequest for what cannot be read."""
        raw: bytes = self.scope.get("query_string", b"")
        if not raw:
            return {}
        try:
            return dict(parse_qsl(raw.decode("ascii"), keep_blank_values=True, max_num_fields=32, errors="strict"))
        except ValueError as error:
            raise InvalidRequest("The query cannot be read") from error

    @property
    def body_is_unread(self) -> bool:
        """Return whether the client may still be sending."""
        if self.stage in ("work", "send"):
            return False
        headers = self.headers
        return b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"

    def stop(self, reason: str) -> None:
        """End it from outside; only while it reads or works, never while it sends."""
        if self.stage != "send" and self.task is not None and not self.stopped:
            self.stopped = reason
            self.task.cancel()

    async def body(self) -> bytes:
        """Return the whole body, inflated.

        Raises TooLarge, UnsupportedMediaType, InvalidRequest and ClientGone.
        """
        limit = self.settings.body_bytes_max
        declared = self.headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > limit:
            raise too_large(int(declared), limit)
        encoding = self.headers.get(b"content-encoding")
        if encoding is not None:
            encoding = _known_encoding(encoding)
        self.stage = "body"
        message = await self.receive()
        if message["type"] != "http.request":
            raise ClientGone
        body: bytes = message.get("body", b"")
        if message.get("more_body", False):
            body = await self._rest(body, limit)
        self.stage = "work"
        if len(body) > limit:
            raise too_large(len(body), limit)
        if encoding is not None:
            if len(body) > INFLATE_INLINE_MAX:
                body = await asyncio.to_thread(inflate, body, encoding, limit)
            else:
                body = inflate(body, encoding, limit)
            self._hold(len(body))
        self.input_size = len(body)
        return body

    def take(self, body: bytes) -> None:
        """Take a body that another protocol has read. Raises TooLarge, and Overloaded where there is no room."""
        self.stage = "call"
        if len(body) > self.settings.body_bytes_max:
            raise too_large(len(body), self.settings.body_bytes_max)
        self._hold(len(body))
        self.input_size = len(body)

    def _hold(self, size: int) -> None:
        if size > HELD_UNCOUNTED_MAX or self.held:
            self.bodies.take(size)
            self.held += size

    async def _rest(self, first: bytes, limit: int) -> bytes:
        pieces = [first]
        self.bytes_seen = len(first)
        self._hold(len(first))
        while True:
            message = await self.receive()
            if message["type"] != "http.request":
                raise ClientGone
            piece = message.get("body", b"")
            pieces.append(piece)
            self.bytes_seen += len(piece)
            if self.bytes_seen > limit:
                raise too_large(self.bytes_seen, limit)
            self._hold(len(piece) if self.held else self.bytes_seen)
            if not message.get("more_body", False):
                return b"".join(pieces)


def too_large(size: int, limit: int) -> TooLarge:
    """Return the error that names limit and size, in bytes."""
    return TooLarge(
        f"The body is larger than {limit} bytes",
        details={"input": "body", "limit": limit, "size": size},
    )


def _known_encoding(value: bytes) -> bytes | None:
    name = value.strip().lower()
    if name in (b"", b"identity"):
        return None
    if name not in _WINDOW:
        raise UnsupportedMediaType(
            "The content encoding is not supported",
            details={"header": "Content-Encoding", "expected": ["gzip", "deflate", "identity"]},
        )
    return name


def inflate(body: bytes, encoding: bytes, limit: int) -> bytes:
    """Undo gzip (several members too) or deflate (with its zlib header); never makes more than `limit` bytes.

    Raises TooLarge as soon as the limit is passed, InvalidRequest for what is damaged or ends early.
    """
    pieces: list[bytes] = []
    total = 0
    # What is left of a member's input is copied once for each member; in steps, so that many short members (an empty
    # one has 20 bytes) cost what their bytes cost, and not their number times the body.
    at, size = 0, len(body)
    for _ in range(MEMBERS_MAX):
        stream = zlib.decompressobj(_WINDOW[encoding])
        rest = b""
        while not stream.eof:
            if not rest:
                if at >= size:
                    raise _damaged(encoding)
                rest, at = body[at : at + _READ_STEP], at + _READ_STEP
            try:
                piece = stream.decompress(rest, min(_INFLATE_STEP, limit + 1 - total))
            except zlib.error as error:
                raise _damaged(encoding) from error
            total += len(piece)
            pieces.append(piece)
            if total > limit:
                raise TooLarge(
                    f"The body is larger than {limit} bytes once it is decompressed",
                    details={"input": "body", "limit": limit, "size": f"more than {limit}"},
                )
            rest = stream.unconsumed_tail
        at = min(at, size) - len(stream.unused_data)
        if at >= size or encoding == b"deflate":
            break
    # Bytes behind the end, or more members than anybody makes who does not mean harm.
    if at < size:
        raise _damaged(encoding)
    return b"".join(pieces)


def _damaged(encoding: bytes) -> InvalidRequest:
    name = encoding.decode("ascii")
    return InvalidRequest(f"The body is not valid {name}", details={"input": "body", "expected": name})
