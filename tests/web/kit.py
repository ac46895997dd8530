"""A door over plain functions, an in-process client, and a real listener for the tests of `web`."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.clock import Clock, SystemClock
from headrace.errors import ModelNotFound, ModelUnavailable, RequestNotFound, VersionNotFound
from headrace.services.door import Accepted, Call, ModelState, RequestView
from headrace.telemetry.logs import Logs
from headrace.telemetry.metrics import Metrics
from headrace.tensor import Datatype, InferAnswer, InferRequest, Signature, Tensor, TensorSpec
from headrace.web.app import App, WebSettings, create_app
from headrace.web.server import Listener

Function = Callable[[dict[str, Tensor], Call], Any]


def signature(datatype: Datatype = Datatype.FP32, shape: tuple[int, ...] = (-1, 3)) -> Signature:
    return Signature((TensorSpec("x", datatype, shape),), (TensorSpec("y", datatype, shape),))


def state(name: str = "echo", version: str = "1", **changes: Any) -> ModelState:
    given = {"platform": "python", "signature": signature(), "ready": True, "updated_at_ms": 1_800_000_000_000}
    return ModelState(name, version, **(given | changes))


async def echo(inputs: dict[str, Tensor], call: Call) -> dict[str, Tensor]:
    return {"y": inputs["x"]}


class FakeRequests:
    """Accepted requests in a dictionary."""

    def __init__(self) -> None:
        self.views: dict[str, RequestView] = {}
        self.order: list[str] = []
        self.changed = asyncio.Event()
        self.error: Exception | None = None
        self.waited_s: list[float] = []

    def put(self, id: str, status: str = "pending", **more: Any) -> None:
        body = {"id": id, "status": status, "model": "echo", "model_version": "1", "result": None, "error": None}
        self.views[id] = RequestView(id, status, "echo", "1", json.dumps(body | {"deliveries": []} | more).encode())
        if status != "pending":
            self.order.append(id)
        self.changed.set()
        self.changed = asyncio.Event()

    async def look(self, id: str, wait_s: float) -> RequestView:
        self.waited_s.append(wait_s)
        if self.error is not None:
            raise self.error
        if id not in self.views:
            raise RequestNotFound
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while self.views[id].status == "pending" and wait_s > 0:
                    await self.changed.wait()
        return self.views[id]

    async def cancel(self, id: str) -> RequestView:
        view = await self.look(id, 0)
        if view.status == "pending":
            self.put(id, "failed", error={"code": "cancelled"})
        return self.views[id]

    async def pull(self, cursor: str, limit: int) -> tuple[list[RequestView], str]:
        start = int(cursor or 0)
        ids = self.order[start : start + limit]
        return [self.views[id] for id in ids], str(start + len(ids))


class FakeDoor:
    """A door over one async function per model; it checks requests as the real ones do."""

    def __init__(self, *states: ModelState, run: Function = echo, requests: FakeRequests | None = None) -> None:
        self.states: Sequence[ModelState] = states or (state(),)
        self.run = run
        self.requests = requests
        self.reasons: list[str] = []
        self.calls: list[tuple[InferRequest, Call]] = []
        self.cancelled = 0

    def models(self) -> Sequence[ModelState]:
        return self.states

    def model(self, name: str, version: str | None = None) -> ModelState:
        found = [each for each in self.states if each.name == name]
        if not found:
            raise ModelNotFound(details={"model": name})
        for each in found:
            if each.version == version:
                return each
        if version is not None:
            raise VersionNotFound(details={"model": name, "version": version})
        return found[-1]

    def ready(self) -> Sequence[str]:
        return self.reasons + [f"{each.name}: {each.reason}" for each in self.states if not each.ready]

    async def answer(self, request: InferRequest, call: Call) -> InferAnswer | Accepted:
        self.calls.append((request, call))
        chosen = self.model(request.model, request.version)
        call.model_version = chosen.version
        if chosen.signature is None:
            raise ModelUnavailable
        chosen.signature.check(request.inputs, request.output_names)
        try:
            outputs = await self.run(request.inputs, call)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if isinstance(outputs, Accepted):
            return outputs
        call.queue_time_ms = 0.5
        return InferAnswer(model=chosen.name, version=chosen.version, id=request.id, outputs=outputs)


@dataclass
class Reply:
    """What an application answered."""

    status: int
    headers: dict[str, str]
    body: bytes
    every: list[tuple[str, str]] = field(default_factory=list)

    def json(self) -> Any:
        def refuse(token: str) -> Any:
            raise AssertionError(f"{token} is not JSON")

        return json.loads(self.body, parse_constant=refuse)


async def ask(
    app: Any,
    method: str,
    path: str,
    body: bytes | Sequence[bytes] = b"",
    headers: dict[str, str] | Sequence[tuple[str, str]] = (),
    *,
    receive: Callable[[], Awaitable[dict[str, Any]]] | None = None,
) -> Reply:
    """Send one request in process; a sequence of bytes is a body in pieces, without a length."""
    pieces = [body] if isinstance(body, bytes) else list(body)
    pairs = list(headers.items()) if isinstance(headers, dict) else list(headers)
    if isinstance(body, bytes) and body and not any(name.lower() == "content-length" for name, _ in pairs):
        pairs.append(("content-length", str(len(body))))
    if not isinstance(body, bytes):
        pairs.append(("transfer-encoding", "chunked"))
    raw_path, _, query = path.partition("?")
    scope = {
        "type": "http",
        "method": method,
        "path": raw_path,
        "raw_path": raw_path.encode("latin-1"),
        "query_string": query.encode("latin-1"),
        "headers": [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in pairs],
    }
    sent: list[dict[str, Any]] = []

    async def receive_piece() -> dict[str, Any]:
        if not pieces:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive or receive_piece, send)
    if not sent:
        return Reply(0, {}, b"")
    every = [(name.decode(), value.decode("latin-1")) for name, value in sent[0]["headers"]]
    whole = b"".join(message["body"] for message in sent[1:])
    assert not sent[-1].get("more_body")
    return Reply(sent[0]["status"], dict(every), whole, every)


def tensor(values: Any, datatype: Datatype = Datatype.FP32) -> Tensor:
    return Tensor.of(np.array(values, dtype=datatype.numpy), datatype)


class Lines:
    """What the log said, line by line; it stands in for the writer."""

    def __init__(self) -> None:
        self.raw: list[bytes] = []
        self.dropped = 0

    def put(self, line: bytes, *, urgent: bool) -> None:
        self.raw.append(line)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass

    def all(self, name: str = "request") -> list[dict[str, Any]]:
        return [each for each in map(json.loads, self.raw) if each["event"] == name]


@dataclass
class World:
    """An application with everything around it in the test's hands."""

    door: FakeDoor
    app: App
    lines: Lines
    metrics: Metrics
    clock: Clock

    def count(self, name: str = "headrace_http_requests_total") -> dict[tuple[str, ...], float]:
        return {labels: child.value for labels, child in self.metrics.counter(name).children.items()}

    async def ask(self, method: str, path: str, *args: Any, **more: Any) -> Reply:
        return await ask(self.app, method, path, *args, **more)

    async def predict(self, data: Any, headers: Any = (), path: str = "/predict") -> Reply:
        return await ask(self.app, "POST", path, json.dumps({"data": data}).encode(), headers)


def world(door: FakeDoor | None = None, clock: Clock | None = None, **settings: Any) -> World:
    door = door or FakeDoor()
    clock = clock or SystemClock()
    lines = Lines()
    tracer = settings.pop("tracer", None)
    metrics = Metrics(clock, instance="test")
    logs = Logs(clock, service="test", writer=lines)  # type: ignore[arg-type]
    app = create_app(door, WebSettings(**settings), metrics, logs, clock, tracer=tracer)
    return World(door, app, lines, metrics, clock)


@contextlib.asynccontextmanager
async def listening(world: World) -> AsyncIterator[Listener]:
    listener = Listener(world.app, "127.0.0.1", 0)
    await listener.start()
    try:
        yield listener
    finally:
        await listener.stop()


async def exchange_bytes(port: int, data: bytes, *, end: bool = False) -> bytes:
    """Send raw bytes, read until the other side closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        await writer.drain()
        if end:
            writer.write_eof()
        async with asyncio.timeout(10):
            return await reader.read()
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def parse_reply(raw: bytes) -> Reply:
    """Read one HTTP/1.1 answer with a Content-Length."""
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *rest = head.decode("latin-1").split("\r\n")
    pairs = [(name.strip().lower(), value.strip()) for name, _, value in (line.partition(":") for line in rest)]
    return Reply(int(first.split()[1]), dict(pairs), body, pairs)
