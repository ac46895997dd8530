"""Delivery over real sockets, to receivers of every kind at once (A36)."""

from __future__ import annotations

import asyncio
import base64
import os
from contextlib import AsyncExitStack
from random import Random

from standardwebhooks import Webhook

from headrace.clock import SystemClock
from headrace.message import Result
from headrace.services.delivery import Delivery
from headrace.services.delivery_settings import DeliverySettings
from headrace.sinks import open_sinks
from headrace.sinks.webhook import WebhookSettings
from headrace.stores.base import Finished
from headrace.stores.memory import MemoryStore
from headrace.telemetry.logs import Logs
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.writer import LineWriter
from sinks.receivers import Request, answer, receiving

SECRET = "whsec_" + base64.b64encode(b"s" * 32).decode()


async def hang(request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    await reader.read()
    return False


async def test_a_path_that_fails_takes_nothing_from_the_one_beside_it() -> None:
    """On one host and port, over sockets: whatever the bad path answers, each pair of the good one is sent once."""
    clock = SystemClock()
    store = MemoryStore(clock)
    await store.open()
    fd = os.open(os.devnull, os.O_WRONLY)
    logs = Logs(clock, writer=LineWriter(fd))
    settings = DeliverySettings(schedule_s=(0.0, 0.01, 0.02, 0.03), throttle_s=0.01, poll_s=0.01, grace_s=1)
    sinks = open_sinks(WebhookSettings(allow_private=True, timeout_s=20), webhook_secrets=[SECRET])
    metrics = Metrics(clock, instance="delivery")
    delivery = Delivery(store, sinks, settings, clock=clock, metrics=metrics, logs=logs, rng=Random(1))

    async def by_path(request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        if request.path == "/reset":
            return False
        status = {"/good": b"200 OK", "/500": b"500 No", "/404": b"404 None", "/429": b"429 Slow"}[request.path]
        writer.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\n\r\n")
        return True

    ends: set[tuple[str, str, int]] = set()
    async with receiving(by_path) as receiver:
        bad = [receiver.url(path) for path in ("/500", "/404", "/429", "/reset")]
        running = asyncio.create_task(delivery.run())
        for number in range(200):
            result = Result(
                id=f"m{number}",
                model="m",
                model_version="1",
                accepted_at_ms=0,
                finished_at_ms=clock.now_ms(),
                attempts=1,
            )
            outbox = [(url, b"{}") for url in (*bad, receiver.url("/good"))]
            await store.commit([Finished(result, outbox)])
            await clock.sleep(0.002)
        while (await store.counts()).outbox_pending:
            await clock.sleep(0.01)
        await delivery.stop()
        await running
        for number in range(200):
            for pair in await store.deliveries(f"m{number}"):
                name = pair.destination.rpartition("/")[2]
                if name != "reset":
                    ends.add((name, pair.state, pair.attempts))
    assert ends == {("good", "delivered", 1), ("500", "dead", 4), ("404", "dead", 4), ("429", "dead", 4)}
    assert sum(request.path == "/good" for request in receiver.requests) == 200
    await sinks.close()
    await store.close()
    logs.close()
    os.close(fd)


async def test_a36_good_receivers_see_no_delay_and_bad_ones_end_as_they_must() -> None:
    clock = SystemClock()
    store = MemoryStore(clock)
    await store.open()
    fd = os.open(os.devnull, os.O_WRONLY)
    logs = Logs(clock, writer=LineWriter(fd))
    settings = DeliverySettings(schedule_s=(0.0, 0.05, 0.05), throttle_s=0.05, poll_s=0.02, grace_s=1)
    sinks = open_sinks(WebhookSettings(allow_private=True, timeout_s=0.3), webhook_secrets=[SECRET])
    metrics = Metrics(clock, instance="delivery")
    delivery = Delivery(store, sinks, settings, clock=clock, metrics=metrics, logs=logs, rng=Random(1))
    flood = answer(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000\r\n\r\n" + bytes(1_000_000))
    async with AsyncExitStack() as stack:
        good = await stack.enter_async_context(receiving(answer(b"200 OK")))
        once = await stack.enter_async_context(receiving(answer(b"500 No", b"200 OK")))
        gone = await stack.enter_async_context(receiving(answer(b"410 Gone")))
        huge = await stack.enter_async_context(receiving(flood))
        hung = await stack.enter_async_context(receiving(hang))
        blocked = "http://2130706433/"
        destinations = [receiver.url() for receiver in (once, gone, huge, hung)]

        async def finish(id: str, *to: str) -> None:
            result = Result(id=id, model="m", model_version="1", accepted_at_ms=0, finished_at_ms=0, attempts=1)
            await store.commit([Finished(result, [(destination, b'{"a":1}') for destination in to])])

        async def until(id: str, destination: str, state: str) -> None:
            while state not in {d.state for d in await store.deliveries(id) if d.destination == destination}:
                await clock.sleep(0.01)

        await finish("bad", *destinations, blocked)
        running = asyncio.create_task(delivery.run())
        for number in range(100):
            await finish(f"good{number}", good.url())
        for number in range(100):
            await until(f"good{number}", good.url(), "delivered")
        ends = ("delivered", "dead", "delivered", "dead")
        for destination, end in zip([*destinations, blocked], [*ends, "dead"], strict=True):
            await until("bad", destination, end)
        await delivery.stop()
        await running
    assert len(good.requests) == 100
    assert [len(receiver.requests) for receiver in (once, gone, huge, hung)] == [2, 1, 1, 3]
    for request in (*good.requests, *once.requests):
        Webhook(SECRET).verify(request.body, request.headers)
    assert len({request.headers["webhook-id"] for request in good.requests}) == 100
    await sinks.close()
    await store.close()
    logs.close()
    os.close(fd)
