"""Receivers on real sockets that behave as badly as receivers do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

__all__ = ["Receiver", "Request", "answer", "receiving"]


@dataclass
class Request:
    """What came in."""

    path: str
    headers: dict[str, str]
    body: bytes


Handler = Callable[[Request, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[bool]]


@dataclass
class Receiver:
    """A receiver that is listening."""

    port: int = 0
    requests: list[Request] = field(default_factory=list)
    connections: int = 0
    #: Set when a connection was closed by the sender.
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    def url(self, path: str = "/hook", host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"


def answer(*raw: bytes) -> Handler:
    """Answer with these, one after the other, the last one for ever; a whole answer or its status line."""
    left = list(raw)

    async def handle(request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        text = left.pop(0) if len(left) > 1 else left[0]
        if b"\r\n\r\n" not in text:
            text = b"HTTP/1.1 " + text + b"\r\ncontent-length: 0\r\n\r\n"
        writer.write(text)
        await writer.drain()
        return True

    return handle


@asynccontextmanager
async def receiving(handler: Handler, host: str = "127.0.0.1") -> AsyncIterator[Receiver]:
    """Listen while the block runs; the handler returns whether the connection stays open."""
    receiver = Receiver()
    handling: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handling.add(task)
        receiver.connections += 1
        try:
            open_ = True
            while open_:
                head = await reader.readuntil(b"\r\n\r\n")
                lines = head.decode("latin-1").split("\r\n")
                headers = {
                    name.lower(): value.strip()
                    for name, _, value in (line.partition(":") for line in lines[1:] if line)
                }
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                request = Request(lines[0].split(" ")[1], headers, body)
                receiver.requests.append(request)
                open_ = await handler(request, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            receiver.closed.set()
            handling.discard(task)
            writer.close()

    server = await asyncio.start_server(serve, host, 0)
    receiver.port = server.sockets[0].getsockname()[1]
    try:
        yield receiver
    finally:
        server.close()
        for task in list(handling):
            task.cancel()
        await asyncio.gather(*handling, return_exceptions=True)
