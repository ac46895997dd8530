"""The wall clock of the machine is set while messages are claimed: late or early, never lost, never doubled."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.brokers import Broker, Claim, Receipt, open_broker
from headrace.clock import ManualClock
from headrace.message import Message, new_id

CLAIM_MS = 10_000
HOUR_S = 3600.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["memory", "sqlite"])
async def broker(request: pytest.FixtureRequest, clock: ManualClock, tmp_path: Path) -> AsyncIterator[Broker]:
    url = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/t.db"
    made = open_broker(url, clock=clock)
    await made.open()
    yield made
    await made.close()


async def publish(broker: Broker, clock: ManualClock) -> str:
    now_ms = clock.now_ms()
    sent = Message(
        id=new_id(now_ms, b"s" * 32), model="m", signature="", accepted_at_ms=now_ms, header_length=2, payload=b"{}"
    )
    assert await broker.publish("m", [sent]) == [Receipt(sent.id)]
    return sent.id


async def take(broker: Broker, *, alone: bool = False, count_max: int = 9) -> list[Claim]:
    got = await broker.claim(["m"], count_max=count_max, bytes_max=1 << 20, claim_ms=CLAIM_MS, alone=alone)
    return list(got.claims)


async def test_a_jump_forward_ends_claims_early_but_an_extension_in_time_keeps_them(
    broker: Broker, clock: ManualClock
) -> None:
    await publish(broker, clock)
    claims = await take(broker)
    clock.jump(HOUR_S)
    assert await broker.extend(claims, CLAIM_MS) == set()
    assert await take(broker, alone=True) == []
    assert await broker.ack(claims) == set()
    assert (await broker.depth("m")).waiting == 0


async def test_a_jump_forward_hands_a_message_to_another_and_only_that_one_settles_it(
    broker: Broker, clock: ManualClock
) -> None:
    id = await publish(broker, clock)
    (first,) = await take(broker)
    clock.jump(HOUR_S)
    (second,) = await take(broker, alone=True)
    assert (second.message.id, second.claims_company, second.claims_alone) == (id, 1, 1)
    assert await broker.extend([first], CLAIM_MS) == {first.token}
    assert await broker.ack([first]) == {first.token}
    assert await broker.find([id]) == {id}
    assert await broker.ack([second]) == set()
    assert await broker.find([id]) == set()


async def test_a_jump_back_gives_a_living_claim_its_usual_time_from_its_next_extension(
    broker: Broker, clock: ManualClock
) -> None:
    await publish(broker, clock)
    claims = await take(broker)
    clock.jump(-HOUR_S)
    assert await broker.extend(claims, CLAIM_MS) == set()
    await clock.advance(CLAIM_MS / 1000 - 1)
    assert await take(broker, alone=True) == []
    await clock.advance(1.001)
    assert len(await take(broker, alone=True)) == 1


async def test_a_jump_back_holds_a_dead_holders_claim_for_the_jump_longer_and_not_for_ever(
    broker: Broker, clock: ManualClock
) -> None:
    await publish(broker, clock)
    await take(broker)
    clock.jump(-HOUR_S)
    await clock.advance(HOUR_S)
    assert await take(broker, alone=True) == []
    await clock.advance(CLAIM_MS / 1000 + 0.001)
    assert len(await take(broker, alone=True)) == 1


@pytest.mark.parametrize("jump_s", [-HOUR_S, HOUR_S])
async def test_what_waits_is_claimed_in_its_order_whatever_the_clock_says(
    broker: Broker, clock: ManualClock, jump_s: float
) -> None:
    ids = []
    for _ in range(4):
        ids.append(await publish(broker, clock))
        clock.jump(jump_s)
    depth = await broker.depth("m")
    assert (depth.waiting, depth.claimed) == (4, 0)
    assert depth.oldest_age_ms >= 0
    assert [claim.message.id for claim in await take(broker)] == ids


async def test_a_release_before_a_jump_back_is_late_by_the_jump_at_most(broker: Broker, clock: ManualClock) -> None:
    id = await publish(broker, clock)
    assert await broker.release(await take(broker), delay_ms=1000) == set()
    clock.jump(-60)
    assert await take(broker) == []
    await clock.advance(61.001)
    (claim,) = await take(broker)
    assert (claim.message.id, claim.attempt) == (id, 1)
