"""A gRPC listener over a fake door, on loopback, and a client of bare bytes and hand-made messages."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from headrace.services.door import Call
from headrace.tensor import Tensor
from headrace.web.grpc.listener import GrpcListener
from headrace.web.grpc.messages import INFERENCE, messages
from headrace.web.server import Listener
from web.kit import World


class Client:
    """One channel; `client("ModelInfer", {...})` calls a method of the service and returns (answer, trailer)."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel

    def message(self, name: str, /, **fields: Any) -> Any:
        return messages()[f"inference.{name}Request"](**fields)

    def call(self, name: str, request: Any = None, *, service: str = INFERENCE, **options: Any) -> Any:
        method = messages().methods(service)[name]
        unary = self.channel.unary_unary(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )
        return unary(method.request() if request is None else request, **options)

    def stream(self, name: str, *, service: str = INFERENCE, **options: Any) -> Any:
        method = messages().methods(service)[name]
        return self.channel.stream_stream(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )(**options)


def raw_request(model: str = "echo", shape: tuple[int, ...] = (1, 3), data: bytes = b"\0" * 12, **more: Any) -> Any:
    request = messages()["inference.ModelInferRequest"](model_name=model, raw_input_contents=[data], **more)
    request.inputs.add(name="x", datatype="FP32", shape=shape)
    return request


def trailer_of(found: Any) -> dict[str, Any]:
    return dict(tuple(found))


def error_of(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    """Return the JSON object that came with an error."""
    return dict(json.loads(trailer_of(error.trailing_metadata())["headrace-error-bin"]))


@contextlib.asynccontextmanager
async def serving(world: World) -> AsyncIterator[tuple[Client, Listener]]:
    """Serve both protocols; stop in order at the end."""
    listener = Listener(world.app, "127.0.0.1", 0)
    companion = GrpcListener(world.app, "127.0.0.1", 0)
    await companion.start()
    listener.companion = companion
    await listener.start()
    try:
        options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{companion.port}", options=options) as channel:
            yield Client(channel), listener
    finally:
        await listener.stop()


class Gate:
    """A model that waits until it is let go, and says when it has begun and when it was cancelled."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.open = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def __call__(self, inputs: dict[str, Tensor], call: Call) -> dict[str, Tensor]:
        self.begun.set()
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return {"y": inputs["x"]}


async def failure(awaitable: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    return caught.value
