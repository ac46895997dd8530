"""Extending and settling: what a token can do, and what it cannot do any more."""

from __future__ import annotations

import threading

from headrace.brokers.base import Broker, Claim
from headrace.clock import Clock
from headrace.testing.brokers.bench import BrokerBench, Opened

__all__ = ["SettlingSuite"]


class SettlingSuite(BrokerBench):
    """What `extend`, `extend_blocking`, `ack` and `release` promise."""

    # -- extend -----------------------------------------------------------------------------------------

    async def test_an_extended_claim_lives_on_and_then_expires(self, broker: Broker, clock: Clock) -> None:
        """A run of many claim times is one run (celery#5935)."""
        await self.publish(broker, clock, 1)
        claim = await self.take_one(broker)
        for _ in range(6):
            await self.pass_ms(clock, self.claim_ms // 2)
            assert await broker.extend([claim], self.claim_ms) == set()
            await self._nothing_to_claim(broker)
        await self.expire(clock)
        again = await self.take_one(broker, alone=True)
        assert (again.claims_company, again.claims_alone) == (1, 1)
        assert await broker.extend([claim], self.claim_ms) == {claim.token}

    async def test_an_expired_claim_that_nobody_took_is_still_ours(self, broker: Broker, clock: Clock) -> None:
        """For extending, acknowledging and giving back alike."""
        messages = await self.publish(broker, clock, 3)
        kept, acked, released = await self.lose(broker, clock, 3)
        assert await broker.extend([kept], self.claim_ms) == set()
        assert await broker.ack([acked]) == set()
        assert await broker.release([released]) == set()
        got = await self.take(broker)
        assert [claim.message for claim in got.claims] == messages[2:]
        assert got.suspects_waiting == 0
        assert got.claims[0].attempt == 1

    async def test_extending_tells_the_lost_from_the_kept(self, broker: Broker, clock: Clock) -> None:
        """One lost claim changes nothing for the others of the same call."""
        await self.publish(broker, clock, 3)
        settled, taken, kept = await self.lose(broker, clock, 3)
        await broker.ack([settled])
        assert await broker.extend([kept], self.claim_ms) == set()
        other = await self.take_one(broker, alone=True)
        assert other.message == taken.message
        assert await broker.extend([settled, taken, kept], self.claim_ms) == {settled.token, taken.token}
        assert await broker.extend([], self.claim_ms) == set()
        assert await broker.ack([kept, other]) == set()

    async def test_a_stale_extension_does_not_move_the_new_holders_deadline(self, broker: Broker, clock: Clock) -> None:
        """Else a zombie that beats would keep others' messages from ever coming back (procrastinate#1518)."""
        await self.publish(broker, clock, 1)
        (stale,) = await self.lose(broker, clock)
        await self.take_one(broker, alone=True)
        assert await broker.extend([stale], 10 * self.claim_ms) == {stale.token}
        await self.expire(clock)
        assert (await self.take_one(broker, alone=True)).claims_alone == 2

    async def test_another_thread_can_extend_while_the_loop_is_blocked(self, broker: Broker, clock: Clock) -> None:
        """A model that runs inline blocks the loop for as long as it computes."""
        await self.publish(broker, clock, 2)
        settled, claim = (await self.take(broker)).claims
        await broker.ack([settled])
        await self.pass_ms(clock, self.claim_ms // 2)
        lost: list[set[str]] = []
        thread = threading.Thread(
            target=lambda: lost.append(broker.extend_blocking([settled, claim], self.claim_ms)), daemon=True
        )
        thread.start()
        thread.join(20)
        assert lost == [{settled.token}]
        await self.pass_ms(clock, self.claim_ms * 3 // 4)
        await self._nothing_to_claim(broker)

    # -- ack --------------------------------------------------------------------------------------------

    async def test_an_acknowledged_message_never_comes_back(self, opened: Opened, clock: Clock) -> None:
        """Not to others, not after its claim would have expired, not after a restart."""
        broker = await opened()
        await self.publish(broker, clock, 3)
        claims = (await self.take(broker)).claims
        assert await broker.ack(claims[:2]) == set()
        assert await broker.ack([]) == set()
        await self.expire(clock)
        if broker.features.durable:
            await broker.close()
            broker = await opened()
        got = await self.take(broker, alone=True)
        assert [claim.message.id for claim in got.claims] == [claims[2].message.id]
        await self._nothing_to_claim(broker)

    async def test_a_second_ack_is_reported_lost(self, broker: Broker, clock: Clock) -> None:
        """And takes nothing from the count of what waits."""
        await self.publish(broker, clock, 2)
        claim = await self.take_one(broker)
        assert await broker.ack([claim]) == set()
        assert await broker.ack([claim]) == {claim.token}
        assert await broker.release([claim]) == {claim.token}
        depth = await broker.depth(self.topic)
        assert (depth.waiting, depth.claimed) == (1, 0)

    async def test_a_stale_ack_changes_nothing(self, broker: Broker, clock: Clock) -> None:
        """The newest holder has the message, and only it can settle it (nats-server#4786)."""
        await self.publish(broker, clock, 1)
        (stale,) = await self.lose(broker, clock)
        (staler,) = await self.lose(broker, clock, alone=True)
        newest = await self.take_one(broker, alone=True)
        assert await broker.ack([stale, staler]) == {stale.token, staler.token}
        depth = await broker.depth(self.topic)
        assert (depth.waiting, depth.claimed) == (0, 1)
        assert await broker.ack([stale, newest]) == {stale.token}
        assert (await broker.depth(self.topic)).claimed == 0

    # -- release ----------------------------------------------------------------------------------------

    async def test_a_released_message_is_as_if_it_had_not_been_claimed(self, broker: Broker, clock: Clock) -> None:
        """Fresh, uncounted, and at its old place in the line."""
        messages = await self.publish(broker, clock, 3)
        claims = (await self.take(broker, 2)).claims
        assert await broker.release(claims[:1]) == set()
        assert await broker.release([]) == set()
        again = await self.take(broker)
        assert [claim.message for claim in again.claims] == [messages[0], messages[2]]
        assert [claim.attempt for claim in again.claims] == [1, 1]
        assert again.suspects_waiting == 0
        assert again.claims[0].token != claims[0].token

    async def test_a_delay_is_waited_out(self, broker: Broker, clock: Clock) -> None:
        """Neither sooner nor never."""
        (message,) = await self.publish(broker, clock, 1)
        delay_ms = self.claim_ms // 2
        assert await broker.release([await self.take_one(broker)], delay_ms=delay_ms) == set()
        await self._nothing_to_claim(broker)
        depth = await broker.depth(self.topic)
        assert (depth.waiting, depth.claimed) == (1, 0)
        await self.pass_ms(clock, delay_ms // 2)
        await self._nothing_to_claim(broker)
        await self.pass_ms(clock, delay_ms)
        claim = await self.take_one(broker)
        assert (claim.message, claim.attempt) == (message, 1)

    async def test_a_released_suspect_stays_a_suspect_with_its_old_counts(self, broker: Broker, clock: Clock) -> None:
        """What was lost before it was lost before; the release takes back only its own claim."""
        await self.publish(broker, clock, 1)
        await self.lose(broker, clock)
        await self.lose(broker, clock, alone=True)
        claim = await self.take_one(broker, alone=True)
        assert await broker.release([claim]) == set()
        got = await self.take(broker)
        assert not got.claims
        assert got.suspects_waiting == 1
        again = await self.take_one(broker, alone=True)
        assert (again.claims_company, again.claims_alone) == (1, 2) == (claim.claims_company, claim.claims_alone)

    async def test_a_delayed_suspect_is_not_waiting_yet(self, broker: Broker, clock: Clock) -> None:
        """So nobody empties its process for it in vain."""
        await self.publish(broker, clock, 1)
        await self.lose(broker, clock)
        await broker.release([await self.take_one(broker, alone=True)], delay_ms=self.claim_ms)
        got = await self.take(broker, alone=True)
        assert (list(got.claims), got.suspects_waiting) == ([], 0)
        await self.expire(clock)
        assert (await self.take(broker)).suspects_waiting == 1

    async def test_a_stale_release_changes_nothing(self, broker: Broker, clock: Clock) -> None:
        """Else it would hand the message to a third one while the second runs it."""
        await self.publish(broker, clock, 1)
        (stale,) = await self.lose(broker, clock)
        newest = await self.take_one(broker, alone=True)
        assert await broker.release([stale]) == {stale.token}
        await self._nothing_to_claim(broker)
        assert await broker.release([newest, stale]) == {stale.token}
        assert await broker.extend([newest], self.claim_ms) == {newest.token}
        assert await broker.ack([newest]) == {newest.token}
        assert (await self.take_one(broker, alone=True)).claims_alone == 1

    async def test_many_claims_are_settled_in_one_call(self, broker: Broker, clock: Clock) -> None:
        """More than an engine may take in one statement."""
        count = 1500
        await self.publish(broker, clock, count)
        claims: list[Claim] = []
        while got := (await self.take(broker, 1000)).claims:
            claims += got
        assert len(claims) == count
        assert await broker.extend(claims, self.claim_ms) == set()
        assert await broker.release(claims[:700]) == set()
        assert await broker.ack(claims) == {claim.token for claim in claims[:700]}
        depth = await broker.depth(self.topic)
        assert (depth.waiting, depth.claimed) == (700, 0)

    async def _nothing_to_claim(self, broker: Broker) -> None:
        for alone in (False, True):
            got = await self.take(broker, alone=alone)
            assert (list(got.claims), got.suspects_waiting) == ([], 0)
