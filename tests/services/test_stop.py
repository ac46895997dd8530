from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import BrokerUnavailable, StoreUnavailable
from services.faults import Around, Switch
from services.kit import ENGINES, FunctionRuntime, Hands, road, until

engines = pytest.mark.parametrize("engine", ENGINES)


@engines
async def test_A17_what_is_claimed_is_finished_committed_and_acknowledged_before_the_end(
    engine: str, tmp_path: Path
) -> None:
    async with road(engine, tmp_path) as here:
        hands = Hands(here.clock)
        consumer = here.consumer(hands)
        first = await here.submit(1.0)
        await until(lambda: hands.claims, "a claim")
        later = await here.submit(2.0)
        stopping = asyncio.create_task(here.stop(consumer))
        await asyncio.sleep(0)
        hands.answer(hands.claims[0])
        await stopping
        assert await here.store.present([first, later]) == {first}
        depth = await here.broker.depth("neg")
        assert (depth.waiting, depth.claimed) == (1, 0), "the acknowledgement was flushed, and nothing new was begun"


@engines
async def test_A17_what_is_not_finished_in_time_goes_back_uncounted_and_at_once(engine: str, tmp_path: Path) -> None:
    async with road(engine, tmp_path) as here:
        hands = Hands(here.clock)
        consumer = here.consumer(hands)
        id = await here.submit(1.0)
        await until(lambda: hands.claims, "a claim")
        await here.stop(consumer, grace_s=0.05)
        assert hands.claims == [], "the handler was told"
        heir = Hands(here.clock)
        here.consumer(heir)
        await until(lambda: heir.claims, "a claim by the next process")
        assert [(claim.message.id, claim.attempt, claim.claims_alone) for claim in heir.claims] == [(id, 1, 0)]


async def test_a_second_stop_hastens_the_first(tmp_path: Path) -> None:
    async with road("memory", tmp_path) as here:
        hands = Hands(here.clock)
        consumer = here.consumer(hands)
        await here.submit(1.0)
        await until(lambda: hands.claims, "a claim")
        stopping = asyncio.create_task(here.stop(consumer, grace_s=3600))
        await asyncio.sleep(0)
        consumer.stop(0)
        await stopping
        assert (await here.broker.depth("neg")).waiting == 1


async def test_a_claim_that_arrives_during_the_stop_is_given_back(tmp_path: Path) -> None:
    async with road("memory", tmp_path) as here:
        asked, go_on = asyncio.Event(), asyncio.Event()

        async def claim(*args: Any, **kwargs: Any) -> Any:
            asked.set()
            await go_on.wait()
            return await here.broker.claim(*args, **kwargs)

        hands = Hands(here.clock)
        id = await here.submit(1.0)
        consumer = here.consumer(hands, broker=Around(here.broker, claim=claim))
        await asked.wait()
        stopping = asyncio.create_task(here.stop(consumer))
        await asyncio.sleep(0)
        go_on.set()
        await stopping
        assert hands.seen == []
        got = await here.broker.claim(["neg"], count_max=1, bytes_max=1 << 20, claim_ms=1000, alone=False)
        assert [(claim.message.id, claim.attempt) for claim in got.claims] == [(id, 1)]


async def test_results_that_the_store_does_not_take_in_time_are_given_back_with_their_messages(tmp_path: Path) -> None:
    async with road("memory", tmp_path) as here:
        store = Switch(here.store, StoreUnavailable, "commit", "health")
        store.off = True
        id = await here.submit(1.0)
        consumer = here.inference(FunctionRuntime(), store=store)
        await until(lambda: store.refused, "a refused commit")
        await here.stop(consumer, grace_s=0.05)
        here.inference(FunctionRuntime())
        assert (await here.result(id)).attempts == 1


async def test_a_stop_ends_although_the_broker_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.services.consumer._FLUSH_S", 0.1)
    async with road("memory", tmp_path) as here:
        broker = Switch(here.broker, BrokerUnavailable, "claim", "ack", "release", "wait")
        hands = Hands(here.clock)
        consumer = here.consumer(hands, broker=broker)
        await here.submit(1.0)
        await until(lambda: hands.claims, "a claim")
        broker.off = True
        await here.stop(consumer, grace_s=0.05)


@engines
async def test_A17_nothing_is_redelivered_after_an_orderly_stop_in_the_middle_of_a_storm(
    engine: str, tmp_path: Path
) -> None:
    async with road(engine, tmp_path) as here:
        ids = await asyncio.gather(*(here.submit(float(n)) for n in range(500)))
        runtime = FunctionRuntime()
        for _ in range(5):
            consumer = here.inference(runtime)
            before = len(await here.store.present(ids))

            async def further(before: int = before) -> bool:
                return len(await here.store.present(ids)) > before or before == 500

            await until(further, "some progress")
            await here.stop(consumer)
        here.inference(runtime)
        await here.drained()
        results = await here.store.get(ids)
        assert {result.attempts for result in results.values()} == {1}
        assert sum(len(call) for call in runtime.calls) == len(ids)
