"""Real processes are killed, stopped and starved; afterwards every promise must hold.

Each test ends with the history checker. The claim time is short, so that a dead process's messages come back soon.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from headrace.testing.history import check
from journeys.stack import Receiver, Stack, tensor, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

NEG = "neg=python:headrace.testing.models:neg"
KILL = "kill=python:headrace.testing.models:kill"
SLOW = "slow=python:headrace.testing.models:slow"
QUICK = {"HEADRACE_INFERENCE_CLAIM_S": "1"}
NewStack = Callable[..., Stack]


def rows(number: int) -> dict[str, Any]:
    return tensor("x", "FP32", [[float(number), 1.0, 2.0]])


async def submit_many(
    stack: Stack, http: aiohttp.ClientSession, count: int, *, model: str = "neg", destination: str | None = None
) -> list[str]:
    """Keep 16 submissions in flight until `count` are accepted; an unknown outcome is tried again under its key."""
    numbers = iter(range(count))
    accepted: list[str] = []

    async def submitter() -> None:
        for number in numbers:
            while True:
                id = await stack.submit(http, model, rows(number), key=f"n{number}", destination=destination)
                if id is not None:
                    accepted.append(id)
                    break
                await asyncio.sleep(0.05)

    await asyncio.gather(*(submitter() for _ in range(16)))
    return accepted


async def verify(stack: Stack, http: aiohttp.ClientSession, receiver: Receiver | None = None) -> None:
    """Drain, wait for the deliveries, and let the checker speak."""
    ending = await stack.drained(http)
    if receiver is not None:
        await until(lambda: stack.history.accepted <= receiver.ids, "every id was delivered", 90)
    assert check(stack.history, ending) == []


@pytest.mark.parametrize("point", ["claimed", "computed", "committed", "acked"])
async def test_inference_is_killed_at_each_durable_step(new_stack: NewStack, point: str) -> None:
    stack = new_stack(NEG, HEADRACE_CRASH_AT=f"{point}:25", **QUICK)
    stack.start()
    await stack.ready()
    first = set(stack.pids("inference"))
    async with stack.http() as http:
        await submit_many(stack, http, 150)
        await verify(stack, http)
    assert set(stack.pids("inference")) != first, "the crash point was never reached"
    assert await stack.stop() == 0


async def test_ingest_is_killed_between_publish_and_answer(new_stack: NewStack) -> None:
    stack = new_stack(NEG, HEADRACE_CRASH_AT="published:20", **QUICK)
    stack.start()
    await stack.ready()
    async with stack.http() as http:
        await submit_many(stack, http, 100)
        assert stack.history.unknown > 0, "no client was left without an answer"
        await verify(stack, http)
    assert len(stack.history.accepted) == 100
    assert await stack.stop() == 0


async def test_delivery_is_killed_between_send_and_record(new_stack: NewStack) -> None:
    stack = new_stack(NEG, HEADRACE_WEBHOOK_TIMEOUT_S="1", **QUICK)
    stack.start()
    await stack.ready()
    receiver = Receiver(stack.history)
    killed = []

    def kill_sometimes(number: int) -> int:
        # The request is here and its answer is not on its way yet: what was sent cannot have been recorded.
        if number in (5, 25, 60):
            killed.append(stack.kill("delivery"))
        return 200

    receiver.status = kill_sometimes
    async with receiver.listening(), stack.http() as http:
        await submit_many(stack, http, 50, destination=receiver.url)
        await verify(stack, http, receiver)
    assert len(killed) >= 2
    assert stack.history.deliveries_repeated > 0, "no webhook was sent twice, so nothing was proved"
    assert await stack.stop() == 0


async def test_a_storm_of_kills_loses_and_doubles_nothing(new_stack: NewStack) -> None:
    """kill -9 of a random inference process every second; STORM_MESSAGES makes it longer."""
    count = int(os.environ.get("STORM_MESSAGES", "3000"))
    stack = new_stack(NEG, flags=("--workers", "2"), HEADRACE_INFERENCE_CLAIM_S="2")
    stack.start()
    await stack.ready()
    rng = random.Random(20)
    killed: list[int] = []

    async def storm() -> None:
        while True:
            await asyncio.sleep(1)
            pid = stack.kill("inference", rng=rng)
            if pid is not None:
                killed.append(pid)

    async with Receiver(stack.history).listening() as receiver, stack.http() as http:
        killer = asyncio.create_task(storm())
        try:
            await submit_many(stack, http, count, destination=receiver.url)
            await until(lambda: len(killed) >= 5, "five kills", 60)
            await stack.drained(http, timeout_s=max(120, count / 50))
        finally:
            killer.cancel()
        await verify(stack, http, receiver)
    assert len(stack.history.accepted) == count
    assert await stack.stop() == 0


async def test_a_zombie_that_wakes_up_past_its_claim_changes_nothing(new_stack: NewStack) -> None:
    stack = new_stack(SLOW, flags=("--workers", "2"), HEADRACE_HEARTBEAT_TIMEOUT_S="60", **QUICK)
    stack.start()
    await stack.ready()
    async with stack.http() as http:
        ids = [await stack.submit(http, "slow", tensor("x", "FP32", [[0.2]])) for _ in range(20)]
        await asyncio.sleep(0.3)  # both are in the middle of a message
        zombie = stack.kill("inference", signal.SIGSTOP)
        assert zombie is not None
        for id in ids:
            assert id is not None
            found = await stack.result(http, id)
            stack.history.read(id, _frozen(found))
        os.kill(zombie, signal.SIGCONT)
        again = await stack.submit(http, "slow", tensor("x", "FP32", [[0.0]]))
        assert again is not None
        await stack.result(http, again)
        await until(lambda: stack.pids("inference"), "the zombie or its heir runs")
        await verify(stack, http)
    assert await stack.stop() == 0


def _frozen(found: dict[str, Any]) -> bytes:
    import json

    return json.dumps({name: value for name, value in found.items() if name != "deliveries"}, sort_keys=True).encode()


async def test_a31_a_message_that_kills_its_process_dies_alone(new_stack: NewStack) -> None:
    stack = new_stack(KILL, **QUICK)
    stack.start()
    await stack.ready()
    async with Receiver(stack.history).listening() as receiver, stack.http() as http:
        for number in range(20):
            await stack.submit(http, "kill", tensor("x", "FP32", [[float(number)]]), destination=receiver.url)
            if number == 10:
                killer = await stack.submit(
                    http, "kill", tensor("x", "FP32", [[666.0]]), destination=receiver.url, must_fail=True
                )
        assert killer is not None
        await verify(stack, http, receiver)
        found = await stack.result(http, killer)
    assert found["status"] == "failed"
    assert found["error"]["code"] == "model_failed"
    assert found["error"]["details"]["attempts_alone"] == 3
    assert await stack.stop() == 0


async def test_a_locked_database_delays_and_loses_nothing(new_stack: NewStack) -> None:
    stack = new_stack(NEG, **QUICK)
    stack.start()
    await stack.ready()
    async with stack.http() as http:
        await submit_many(stack, http, 20)
        lock = sqlite3.connect(stack.database, isolation_level=None)
        lock.execute("BEGIN IMMEDIATE")
        try:
            submitting = asyncio.create_task(submit_many(stack, http, 60))
            await asyncio.sleep(3)
        finally:
            lock.execute("ROLLBACK")
            lock.close()
        await submitting
        await verify(stack, http)
    assert len(stack.history.accepted) == 60
    assert await stack.stop() == 0


async def test_a17_sigterm_under_load_stops_in_order_and_a_restart_finishes_the_rest(new_stack: NewStack) -> None:
    stack = new_stack(SLOW, **QUICK)
    stack.start()
    await stack.ready()
    async with stack.http() as http:
        for _ in range(40):
            await stack.submit(http, "slow", tensor("x", "FP32", [[0.1]]))
        load = asyncio.create_task(_keep_submitting(stack, http))
        await asyncio.sleep(0.5)
        assert await stack.stop() == 0
        load.cancel()
    stack.start()
    await stack.ready()
    async with stack.http() as http:
        await verify(stack, http)
    assert await stack.stop() == 0


async def _keep_submitting(stack: Stack, http: aiohttp.ClientSession) -> None:
    while True:
        await stack.submit(http, "slow", tensor("x", "FP32", [[0.01]]))
        await asyncio.sleep(0.01)


async def test_everything_gets_sigterm_at_once_and_still_stops_in_order(new_stack: NewStack) -> None:
    stack = new_stack(NEG, **QUICK)
    stack.start()
    await stack.ready()
    assert stack.process is not None
    async with stack.http() as http:
        await submit_many(stack, http, 200)
        os.killpg(stack.process.pid, signal.SIGTERM)
        await until(lambda: stack.process is not None and stack.process.poll() is not None, "exit", 30)
        assert stack.process.returncode == 0
    stack.start()
    await stack.ready()
    async with stack.http() as http:
        await verify(stack, http)
    assert await stack.stop() == 0


async def test_the_whole_stack_is_killed_and_a_new_one_finishes(new_stack: NewStack) -> None:
    stack = new_stack(SLOW, **QUICK)
    stack.start()
    await stack.ready()
    async with stack.http() as http:
        for _ in range(30):
            await stack.submit(http, "slow", tensor("x", "FP32", [[0.05]]))
    stack.destroy()
    stack.start()
    await stack.ready()
    async with stack.http() as http:
        await verify(stack, http)
    assert await stack.stop() == 0


async def test_a_full_line_refuses_with_429_and_loses_no_202(new_stack: NewStack) -> None:
    stack = new_stack(SLOW, HEADRACE_INGEST_QUEUE_LENGTH_MAX="20", **QUICK)
    stack.start()
    await stack.ready()
    refusals = []
    async with stack.http() as http:

        async def flood() -> None:
            for _ in range(20):
                body = tensor("x", "FP32", [[0.02]])
                headers = {"Prefer": "respond-async"}
                async with http.post("/v2/models/slow/infer", json=body, headers=headers) as answer:
                    content = await answer.json()
                    if answer.status == 202:
                        stack.history.accept(content["id"])
                    else:
                        refusals.append((answer.status, content["code"], int(answer.headers["Retry-After"])))

        await asyncio.gather(*(flood() for _ in range(8)))
        assert refusals
        assert {(status, code) for status, code, _ in refusals} == {(429, "overloaded")}
        assert all(seconds >= 1 for _, _, seconds in refusals)
        await verify(stack, http)
    assert await stack.stop() == 0
