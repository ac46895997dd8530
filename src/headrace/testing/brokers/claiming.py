"""Claiming, waiting and looking."""

from __future__ import annotations

import asyncio

import pytest

from headrace.brokers.base import Broker, Claim, Depth
from headrace.clock import Clock
from headrace.testing.brokers.bench import BrokerBench, Opened

__all__ = ["ClaimingSuite"]


class ClaimingSuite(BrokerBench):
    """What `claim`, `wait`, `find`, `read`, `depth` and `health` promise."""

    async def test_a_claim_says_what_it_is(self, broker: Broker, clock: Clock) -> None:
        """Topic, token, deadline and the count, which includes this time."""
        await self.publish(broker, clock, 2)
        before_ms = clock.now_ms()
        one, two = (await self.take(broker)).claims
        assert one.topic == two.topic == self.topic
        assert one.token and two.token and one.token != two.token
        assert before_ms + self.claim_ms <= one.deadline_ms <= clock.now_ms() + self.claim_ms + 1000
        assert (one.claims_company, one.claims_alone, one.attempt) == (1, 0, 1)

    async def test_nothing_to_claim_is_said_at_once(self, broker: Broker, clock: Clock) -> None:
        """In an empty, an unknown and no topic."""
        await broker.ack([await self._only(broker, clock)])
        for topics in ([self.topic], ["unknown"], []):
            for alone in (False, True):
                got = await self.soon(
                    broker.claim(topics, count_max=5, bytes_max=1000, claim_ms=self.claim_ms, alone=alone)
                )
                assert (list(got.claims), got.suspects_waiting) == ([], 0)

    async def test_the_oldest_are_claimed_first_and_each_by_one(self, broker: Broker, clock: Clock) -> None:
        """Up to `count_max` at a time."""
        messages = await self.publish(broker, clock, 7)
        taken = [[claim.message.id for claim in (await self.take(broker, 3)).claims] for _ in range(4)]
        assert [len(ids) for ids in taken] == [3, 3, 1, 0]
        assert [id for ids in taken for id in ids] == [message.id for message in messages]

    async def test_of_several_topics_the_oldest_are_claimed_first(self, broker: Broker, clock: Clock) -> None:
        """And topics that were not asked for are left alone."""
        topics = [self.topic, f"{self.topic}-2", f"{self.topic}-3"]
        order = [0, 1, 1, 2, 0, 2, 1, 0]
        messages = [self.message(clock) for _ in order]
        for number, message in zip(order, messages, strict=True):
            await broker.publish(topics[number], [message])
        got = await broker.claim(topics[:2], count_max=5, bytes_max=1 << 30, claim_ms=self.claim_ms, alone=False)
        expected = [(message, topics[number]) for number, message in zip(order, messages, strict=True) if number < 2]
        assert [(claim.message, claim.topic) for claim in got.claims] == expected[:5]
        got = await broker.claim(topics, count_max=9, bytes_max=1 << 30, claim_ms=self.claim_ms, alone=False)
        assert [claim.message for claim in got.claims] == [messages[3], messages[5], messages[7]]

    async def test_bytes_bound_a_claim_but_one_message_always_fits(self, broker: Broker, clock: Clock) -> None:
        """A message larger than the bound would never be run otherwise."""
        await self.publish(broker, clock, 5, payload=b"{}" + bytes(10_000))
        assert len((await self.take(broker, bytes_max=25_000)).claims) == 2
        assert len((await self.take(broker, bytes_max=1)).claims) == 1
        assert len((await self.take(broker, bytes_max=1 << 30)).claims) == 2

    async def test_claimants_at_once_share_and_never_double(self, opened: Opened, clock: Clock) -> None:
        """Each message is claimed by exactly one of them."""
        broker = await opened()
        other = await opened() if broker.features.shared else broker
        messages = await self.publish(broker, clock, 60)
        taken = await asyncio.gather(*(self.take((broker, other)[number % 2], 7) for number in range(12)))
        ids = [claim.message.id for claims in taken for claim in claims.claims]
        assert sorted(ids) == sorted(message.id for message in messages)

    # -- lost claims ------------------------------------------------------------------------------------

    async def test_a_lost_message_is_a_suspect_and_only_claimed_alone(self, broker: Broker, clock: Clock) -> None:
        """Company is not guilt, but it must not happen twice."""
        messages = await self.publish(broker, clock, 3)
        await self.lose(broker, clock, 2)
        got = await self.take(broker)
        assert [claim.message for claim in got.claims] == messages[2:]
        assert got.suspects_waiting == 2
        first = await self.take(broker, 100, alone=True)
        assert [claim.message for claim in first.claims] == messages[:1]
        assert first.suspects_waiting == 1
        second = await self.take(broker, 100, alone=True)
        assert [claim.message for claim in second.claims] == messages[1:2]
        assert second.suspects_waiting == 0
        assert not (await self.take(broker, alone=True)).claims

    async def test_a_fresh_message_is_not_claimed_alone(self, broker: Broker, clock: Clock) -> None:
        """Alone is slow, and fresh messages are nearly always innocent."""
        await self.publish(broker, clock, 2)
        got = await self.take(broker, alone=True)
        assert (list(got.claims), got.suspects_waiting) == ([], 0)
        assert len((await self.take(broker)).claims) == 2

    async def test_attempts_are_counted_in_company_and_alone(self, broker: Broker, clock: Clock) -> None:
        """Whoever dies leaves a count behind, every time (pulsar#23944)."""
        await self.publish(broker, clock, 1)
        counts = []
        for alone in (False, True, True, True):
            (claim,) = await self.lose(broker, clock, alone=alone)
            counts.append((claim.claims_company, claim.claims_alone, claim.attempt))
        assert counts == [(1, 0, 1), (1, 1, 2), (1, 2, 3), (1, 3, 4)]
        assert not (await self.take(broker)).claims

    async def test_an_attempt_counts_though_its_process_never_said_another_word(
        self, opened: Opened, clock: Clock
    ) -> None:
        """The count is durable before the claim is returned (taskiq-aio-pika#35, pipeshub-ai#3037)."""
        broker = await opened()
        if not broker.features.shared:
            pytest.skip("this engine has one process")
        await self.publish(broker, clock, 1)
        await self.lose(broker, clock)
        await self.lose(await opened(), clock, alone=True)
        claim = await self.take_one(await opened(), alone=True)
        assert (claim.claims_company, claim.claims_alone) == (1, 2)

    async def test_a_closed_broker_leaves_its_claims_to_expire(self, opened: Opened, clock: Clock) -> None:
        """They are neither given back early nor held for ever."""
        broker = await opened()
        if not broker.features.durable:
            pytest.skip("this engine ends with its process")
        (message,) = await self.publish(broker, clock, 1)
        await self.take_one(broker)
        await broker.close()
        broker = await opened()
        for alone in (False, True):
            assert not (await self.take(broker, alone=alone)).claims
        await self.expire(clock)
        assert (await self.take_one(broker, alone=True)).message == message

    async def test_each_suspect_is_claimed_alone_by_one(self, opened: Opened, clock: Clock) -> None:
        """Two processes that look at once get two different ones."""
        broker = await opened()
        other = await opened() if broker.features.shared else broker
        messages = await self.publish(broker, clock, 4)
        await self.lose(broker, clock, 4)
        calls = (self.take((broker, other)[number % 2], 9, alone=True) for number in range(6))
        got = [claims.claims for claims in await asyncio.gather(*calls)]
        assert sorted(len(claims) for claims in got) == [0, 0, 1, 1, 1, 1]
        assert {claim.message.id for claims in got for claim in claims} == {message.id for message in messages}

    # -- waiting ----------------------------------------------------------------------------------------

    async def test_waiting_ends_with_its_timeout(self, broker: Broker) -> None:
        """Also on a topic that nobody knows."""
        await self.soon(broker.wait([self.topic, "unknown"], 0.01))

    async def test_a_publish_wakes_who_waits(self, opened: Opened, clock: Clock) -> None:
        """Here and in other processes; on any of the topics."""
        broker = await opened()
        waiters = [broker, await opened()] if broker.features.shared else [broker]
        waits = [asyncio.ensure_future(waiter.wait(["unknown", self.topic], 600)) for waiter in waiters]
        await asyncio.sleep(0)
        await self.publish(broker, clock, 1)
        await self.soon(asyncio.gather(*waits))

    async def test_a_release_wakes_who_waits(self, broker: Broker, clock: Clock) -> None:
        """What was given back is to be claimed like a new one."""
        claim = await self._only(broker, clock)
        waiting = asyncio.ensure_future(broker.wait([self.topic], 600))
        await asyncio.sleep(0)
        await broker.release([claim])
        await self.soon(waiting)

    async def test_a_wait_that_is_cancelled_harms_nothing(self, broker: Broker, clock: Clock) -> None:
        """The next one is woken as ever (nats.py#392)."""
        waiting = asyncio.ensure_future(broker.wait([self.topic], 600))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await self.test_a_publish_wakes_again(broker, clock)

    async def test_a_publish_wakes_again(self, broker: Broker, clock: Clock) -> None:
        """Every time, not only the first."""
        for _ in range(3):
            waiting = asyncio.ensure_future(broker.wait([self.topic], 600))
            await asyncio.sleep(0)
            await self.publish(broker, clock, 1)
            await self.soon(waiting)
            await broker.ack((await self.take(broker)).claims)

    # -- looking ----------------------------------------------------------------------------------------

    async def test_find_knows_what_is_accepted_and_not_settled(self, broker: Broker, clock: Clock) -> None:
        """Waiting and claimed, but neither settled nor unknown; for any number of ids."""
        if not broker.features.look_up:
            pytest.skip("this engine cannot look up")
        messages = await self.publish(broker, clock, 3)
        claims = (await self.take(broker, 2)).claims
        await broker.ack(claims[:1])
        ids = {message.id for message in messages}
        unknown = {self.message(clock).id for _ in range(3000)}
        assert await broker.find(ids | unknown) == ids - {messages[0].id}
        assert await broker.find([]) == set()

    async def test_read_shows_a_message_and_claims_nothing(self, broker: Broker, clock: Clock) -> None:
        """Waiting and claimed; None for what is settled or was never there."""
        if not broker.features.look_up:
            pytest.skip("this engine cannot look up")
        message = self.message(clock, destinations=("https://example.com/hook",))
        await broker.publish(self.topic, [message])
        assert await broker.read(message.id) == message
        claim = await self.take_one(broker)
        assert claim.attempt == 1
        assert await broker.read(message.id) == message
        await broker.ack([claim])
        assert await broker.read(message.id) is None
        assert await broker.read(self.message(clock).id) is None

    async def test_depth_adds_up_at_every_step(self, broker: Broker, clock: Clock) -> None:
        """waiting + claimed = accepted and not settled; lost claims wait again."""
        assert await broker.depth("unknown") == Depth(0, 0, 0, 0)
        await self.publish(broker, clock, 4)
        assert await self._counts(broker) == (4, 0)
        claims = (await self.take(broker, 3)).claims
        assert await self._counts(broker) == (1, 3)
        await broker.ack(claims[:1])
        assert await self._counts(broker) == (1, 2)
        await broker.release(claims[1:2])
        assert await self._counts(broker) == (2, 1)
        await self.expire(clock)
        assert await self._counts(broker) == (3, 0)
        suspect = await self.take_one(broker, alone=True)
        assert await self._counts(broker) == (2, 1)
        rest = (await self.take(broker)).claims
        assert await self._counts(broker) == (0, 3)
        await broker.ack([suspect, *rest])
        assert await broker.depth(self.topic) == Depth(0, 0, 0, 0)

    async def test_depth_measures_bytes_and_the_age_of_the_oldest_that_nobody_holds(
        self, broker: Broker, clock: Clock
    ) -> None:
        """0 when all are held; a lost one is old again."""
        step_ms = self.claim_ms // 4
        await self.publish(broker, clock, 1, payload=b"{}" + bytes(5000))
        await self.pass_ms(clock, step_ms)
        await self.publish(broker, clock, 1)
        depth = await broker.depth(self.topic)
        assert depth.bytes > 5000
        assert step_ms <= depth.oldest_age_ms < 2 * step_ms
        await self.take(broker, 1)
        assert (await broker.depth(self.topic)).oldest_age_ms < step_ms
        await self.take(broker, 1)
        assert (await broker.depth(self.topic)).oldest_age_ms == 0
        await self.expire(clock)
        assert (await broker.depth(self.topic)).oldest_age_ms >= step_ms + self.claim_ms

    async def test_health_is_silent_when_all_is_well(self, broker: Broker) -> None:
        """And adds nothing to any topic."""
        await broker.health()
        assert await broker.depth(self.topic) == Depth(0, 0, 0, 0)

    async def _only(self, broker: Broker, clock: Clock) -> Claim:
        await self.publish(broker, clock, 1)
        return await self.take_one(broker)

    async def _counts(self, broker: Broker) -> tuple[int, int]:
        depth = await broker.depth(self.topic)
        return depth.waiting, depth.claimed
