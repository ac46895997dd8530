"""What every call goes through: its id and deadline, its bytes, its errors, its line in the access log.

gRPC is HTTP/2, so a call is an `Exchange` like any other: POST to its method's path, with its metadata as headers.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from headrace.errors import Cancelled, DeadlineExceeded, HeadraceError, Internal, InvalidRequest, NotReady, TooLarge
from headrace.services.statuses import GRPC, HTTP
from headrace.web.app import App
from headrace.web.errors import error_body
from headrace.web.exchange import Exchange
from headrace.web.grpc.messages import Method
from headrace.web.site import Site

__all__ = ["ERROR_KEY", "Calls", "Endpoint", "code_of", "text_of"]

#: Trailing metadata that holds the JSON error object, as HTTP's body does.
ERROR_KEY = "headrace-error-bin"

#: Metadata is small: clients take 8 KiB in all unless told otherwise, and binary values grow by a third.
_ERROR_BYTES_MAX = 4096
_MESSAGE_CHARS_MAX = 1024

Answering = Callable[[Site, Exchange, Any], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method with one request and one answer, and what makes the answer."""

    method: Method
    answer: Answering
    #: As `Route.kind`: "inference" counts in /health.
    kind: str = ""
    #: Answered also when the listener refuses everything else, because it stops.
    always: bool = False


class Calls:
    """The way from a call's bytes to the application and back."""

    def __init__(self, app: App) -> None:
        """Serve an application."""
        self.app = app
        self.site = app.site
        #: Set when streams have to end, because the listener does.
        self.closing = asyncio.Event()

    def enter(self, method: str, kind: str, context: Any, number: int = 0) -> Exchange:
        """Begin a call, or the request with this number in a stream; `app.leave` ends it."""
        headers = []
        for key, value in context.invocation_metadata():
            if number and key == "x-request-id":
                # The id is that of the stream; its requests have to be told apart.
                value = f"{value}-{number}"
            headers.append((key.encode("ascii"), value if isinstance(value, bytes) else value.encode("utf-8")))
        exchange = self.app.enter({"type": "grpc", "method": "POST", "headers": headers}, _no_more)
        exchange.template, exchange.kind, exchange.stage = method, kind, "call"
        exchange.deadline_s = context.time_remaining()
        return exchange

    async def unary(self, endpoint: Endpoint, context: Any) -> bytes:
        """Answer one call."""
        exchange = self.enter(endpoint.method.path, endpoint.kind, context)
        try:
            reply = await self.outcome(exchange, context, self._read_and_work(endpoint, exchange, context))
            self._trace(exchange, context)
            trailer = self.trailer(exchange)
            if reply is not None:
                context.set_trailing_metadata(trailer)
                return reply
            assert exchange.error is not None
            return bytes(await context.abort(code_of(exchange.error), text_of(exchange.error), trailer))
        finally:
            self.app.leave(exchange)

    async def _read_and_work(self, endpoint: Endpoint, exchange: Exchange, context: Any) -> bytes:
        if self.site.refusing and not endpoint.always:
            raise NotReady("The service is stopping")
        settings = self.site.settings
        try:
            # Core does not say how much is there, so that this is the time of the longest body at the least pace.
            async with asyncio.timeout(
                settings.body_timeout_s + settings.body_bytes_max / settings.body_bytes_per_s_min
            ):
                data = await context.read()
        except TimeoutError:
            raise InvalidRequest("The message did not arrive in time", details={"input": "body"}) from None
        if data is grpc.aio.EOF:
            # A message that is too long is refused by core, which has told the caller both lengths; this is the log's.
            limit = settings.body_bytes_max
            raise TooLarge(f"There is no message of at most {limit} bytes", details={"input": "body", "limit": limit})
        return await self.work(endpoint, exchange, data)

    async def work(self, endpoint: Endpoint, exchange: Exchange, data: bytes) -> bytes:
        """Have the bytes of a request answered, and return the answer's. Raises HeadraceError."""
        if self.site.refusing and not endpoint.always:
            raise NotReady("The service is stopping")
        exchange.take(data)
        try:
            message = endpoint.method.request.FromString(data)
        except DecodeError as error:
            raise InvalidRequest(
                "The message cannot be read", details={"expected": endpoint.method.request.DESCRIPTOR.full_name}
            ) from error
        answer = await endpoint.answer(self.site, exchange, message)
        return bytes(answer.SerializeToString())

    async def outcome(self, exchange: Exchange, context: Any, work: Awaitable[bytes]) -> bytes | None:
        """Return what the work gives; None where it failed, and `exchange.error` says how. Cancelling goes through."""
        try:
            reply = await work
            exchange.status = exchange.status or (200 if exchange.error is None else HTTP[exchange.error.code])
            return reply
        except HeadraceError as error:
            exchange.error = error
        except asyncio.CancelledError:
            if not self.site.refusing:
                # Core ends calls whose caller has gone, and those whose time is over.
                late = context.time_remaining() == 0
                exchange.error = DeadlineExceeded() if late else Cancelled("The client cancelled the call")
                exchange.status = HTTP[exchange.error.code]
                raise
            if exchange.task is not None:
                exchange.task.uncancel()
            exchange.error = NotReady("The service is stopping")
        except Exception as error:
            self.site.log_failure(exchange, error)
            exchange.error = Internal()
        exchange.status = HTTP.get(exchange.error.code, 500)
        return None

    def trailer(self, exchange: Exchange) -> tuple[tuple[str, str | bytes], ...]:
        """Return the metadata that ends a call: what HTTP says in headers, and the error object."""
        version = exchange.model_version or self.site.shown_version()
        pairs: list[tuple[str, str | bytes]] = [
            ("x-request-id", exchange.request_id),
            ("x-model-version", version.encode("ascii", "replace").decode("ascii")),
            *((key.decode("ascii"), value.decode("ascii")) for key, value in exchange.extra_headers),
        ]
        if exchange.location:
            pairs.append(("location", exchange.location))
        error = exchange.error
        if error is not None:
            pairs.append((ERROR_KEY, _small_body(error, exchange.request_id)))
            if error.retry_after_s is not None:
                pairs.append(("retry-after", str(max(1, math.ceil(error.retry_after_s)))))
        return tuple(pairs)

    async def receive(self, context: Any) -> bytes | None:
        """Return the next request of a stream; None at its end, and when streams have to end."""
        reading = asyncio.ensure_future(context.read())
        closing = asyncio.ensure_future(self.closing.wait())
        try:
            await asyncio.wait({reading, closing}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                return None
            data = reading.result()
            return None if data is grpc.aio.EOF else data
        finally:
            reading.cancel()
            closing.cancel()

    async def end_stream(self, context: Any) -> None:
        """End a stream that the listener's end cuts short, so that its caller turns to another server."""
        if self.closing.is_set():
            error = NotReady("The service is stopping")
            await context.abort(code_of(error), text_of(error), ())

    def _trace(self, exchange: Exchange, context: Any) -> None:
        tracer = self.site.tracer
        if exchange.span is not None and tracer.enabled:
            span = tracer.span("response_sent", exchange.span.context, status=exchange.status)
            context.add_done_callback(lambda _: span.end())


def code_of(error: HeadraceError) -> Any:
    """Return the status of an error."""
    return getattr(grpc.StatusCode, GRPC.get(error.code, "INTERNAL"))


def text_of(error: HeadraceError) -> str:
    """Return the status message of an error: one line for people."""
    text = error.message
    return text if len(text) <= _MESSAGE_CHARS_MAX else f"{text[:_MESSAGE_CHARS_MAX]}…"


def _small_body(error: HeadraceError, request_id: str) -> bytes:
    body = error_body(error, request_id)
    if len(body) <= _ERROR_BYTES_MAX:
        return body
    short = type(error)(text_of(error), retry_after_s=error.retry_after_s)
    return error_body(short, request_id)


async def _no_more() -> dict[str, str]:
    return {"type": "http.disconnect"}
