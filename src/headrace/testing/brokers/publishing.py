"""Publishing, keys and limits."""

from __future__ import annotations

import asyncio

import pytest

from headrace.brokers.base import Broker, Receipt
from headrace.clock import Clock
from headrace.errors import HeadraceError, Overloaded, TooLarge
from headrace.message import SCHEMA
from headrace.testing.brokers.bench import BrokerBench, Opened, stored

__all__ = ["PublishingSuite"]


class PublishingSuite(BrokerBench):
    """What `publish`, `forget` and `fingerprints` promise."""

    async def test_a_message_comes_back_as_it_was_sent(self, broker: Broker, clock: Clock) -> None:
        """Every field, also empty ones, odd text and a payload of a few MiB."""
        now_ms = clock.now_ms()
        full = self.message(
            clock,
            version="2",
            expires_at_ms=now_ms + 60_000,
            destinations=("https://example.com/hook", "https://example.com/ü?a=1"),
            request_id="r-1",
            client_id='a "quoted" 猫 %',
            traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            tracestate="vendor=1",
            fingerprint="f" * 64,
            replay_of="06hhgq2g03j92y6eng5wmr46tkghg6pk",
        )
        bare = self.message(clock, signature="", payload=b"", header_length=0)
        large = self.message(clock, payload=bytes(range(256)) * 2048)
        assert len(stored(await broker.publish(self.topic, [full, bare, large]))) == 3
        claims = (await self.take(broker)).claims
        assert [claim.message for claim in claims] == [full, bare, large]

    async def test_there_is_one_outcome_for_each_message_in_order(self, broker: Broker, clock: Clock) -> None:
        """Also for none, and for the same id twice in one call."""
        assert await broker.publish(self.topic, []) == []
        one, two = self.message(clock), self.message(clock)
        outcomes = await broker.publish(self.topic, [one, two, one])
        assert outcomes == [Receipt(one.id), Receipt(two.id), Receipt(one.id, already_present=True)]
        assert len((await self.take(broker)).claims) == 2

    async def test_an_id_that_is_in_the_topic_is_not_stored_again(self, broker: Broker, clock: Clock) -> None:
        """Whether it waits or is claimed; it is neither doubled nor reset."""
        (message,) = await self.publish(broker, clock, 1)
        again = [Receipt(message.id, already_present=True)]
        assert await broker.publish(self.topic, [message]) == again
        claim = await self.take_one(broker)
        assert await broker.publish(self.topic, [message]) == again
        assert not (await self.take(broker)).claims
        assert await broker.ack([claim]) == set()
        assert (await broker.depth(self.topic)).waiting == 0

    async def test_a_keyed_id_is_refused_also_after_its_message_is_gone(self, broker: Broker, clock: Clock) -> None:
        """And answered with the fingerprint that it first came with, in whatever topic it comes again."""
        if not broker.features.unique_publish:
            pytest.skip("this engine does not keep keys")
        first = self.keyed(clock, "k", "1" * 64)
        other = self.keyed(clock, "k", "2" * 64)
        known = [Receipt(first.id, already_present=True, fingerprint="1" * 64)]
        assert await broker.publish(self.topic, [first]) == [Receipt(first.id)]
        assert await broker.publish(self.topic, [other]) == known
        await broker.ack([await self.take_one(broker)])
        assert await broker.publish(self.topic, [other]) == known
        assert await broker.publish(f"{self.topic}-2", [first]) == known
        assert (await broker.depth(self.topic)).waiting == 0
        assert (await broker.depth(f"{self.topic}-2")).waiting == 0

    async def test_two_of_one_key_in_one_call_are_one_message(self, broker: Broker, clock: Clock) -> None:
        """The first is stored, the second is told so."""
        if not broker.features.unique_publish:
            pytest.skip("this engine does not keep keys")
        first, other = self.keyed(clock, "k", "1" * 64), self.keyed(clock, "k", "2" * 64)
        outcomes = await broker.publish(self.topic, [first, other])
        assert outcomes == [Receipt(first.id), Receipt(first.id, already_present=True, fingerprint="1" * 64)]

    async def test_fingerprints_are_known_until_they_are_forgotten(self, broker: Broker, clock: Clock) -> None:
        """Unkeyed and unknown ids have none."""
        if not broker.features.unique_publish:
            pytest.skip("this engine does not keep keys")
        keyed, plain = self.keyed(clock, "k", "1" * 64), self.message(clock)
        await broker.publish(self.topic, [keyed, plain])
        asked = [keyed.id, plain.id, self.keyed(clock, "other").id]
        assert await broker.fingerprints(asked) == {keyed.id: "1" * 64}
        assert await broker.fingerprints([]) == {}
        await broker.ack((await self.take(broker)).claims)
        assert await broker.fingerprints(asked) == {keyed.id: "1" * 64}
        await broker.forget([keyed.id], 0)
        assert await broker.fingerprints(asked) == {}
        assert stored(await broker.publish(self.topic, [keyed])) == [keyed.id]

    async def test_old_keys_are_forgotten_but_not_those_in_a_topic(self, broker: Broker, clock: Clock) -> None:
        """Age is counted from when the message was accepted."""
        if not broker.features.unique_publish:
            pytest.skip("this engine does not keep keys")
        now_ms = clock.now_ms()
        ages = {"settled": 1000, "waiting": 1000, "young": 0}
        messages = {key: self.keyed(clock, key, accepted_at_ms=now_ms - age) for key, age in ages.items()}
        for key in ("settled", "young"):
            await broker.publish(self.topic, [messages[key]])
        await broker.ack((await self.take(broker)).claims)
        await broker.publish(self.topic, [messages["waiting"]])
        await broker.forget([], now_ms - 500)
        known = await broker.fingerprints([message.id for message in messages.values()])
        assert known.keys() == {messages["waiting"].id, messages["young"].id}

    async def test_a_full_topic_refuses_and_stores_nothing(self, opened: Opened, clock: Clock) -> None:
        """Up to the limit it takes, beyond it refuses each; what is already there is still recognised."""
        broker = await opened(length_max=3)
        messages = [self.message(clock) for _ in range(5)]
        outcomes = await broker.publish(self.topic, messages)
        assert stored(outcomes) == [message.id for message in messages[:3]]
        assert [type(found) for found in outcomes[3:]] == [Overloaded, Overloaded]
        again = await broker.publish(self.topic, [messages[0], messages[4]])
        assert again[0] == Receipt(messages[0].id, already_present=True)
        assert isinstance(again[1], Overloaded)
        assert (await broker.depth(self.topic)).waiting == 3
        assert len(stored(await broker.publish(f"{self.topic}-2", [self.message(clock)]))) == 1

    async def test_a_refused_key_is_not_remembered(self, opened: Opened, clock: Clock) -> None:
        """Nothing was stored, so nothing may say that it was."""
        broker = await opened(length_max=1)
        if not broker.features.unique_publish:
            pytest.skip("this engine does not keep keys")
        keyed = self.keyed(clock, "k")
        outcomes = await broker.publish(self.topic, [self.message(clock), keyed])
        assert isinstance(outcomes[1], Overloaded)
        assert await broker.fingerprints([keyed.id]) == {}
        await broker.ack([await self.take_one(broker)])
        assert stored(await broker.publish(self.topic, [keyed])) == [keyed.id]

    async def test_claimed_messages_count_towards_the_limit_and_settled_ones_do_not(
        self, opened: Opened, clock: Clock
    ) -> None:
        """Accepted and not answered is what is bounded."""
        broker = await opened(length_max=2)
        await self.publish(broker, clock, 2)
        claims = (await self.take(broker)).claims
        assert isinstance((await broker.publish(self.topic, [self.message(clock)]))[0], Overloaded)
        await broker.release(claims[:1])
        assert isinstance((await broker.publish(self.topic, [self.message(clock)]))[0], Overloaded)
        await broker.ack(claims[1:])
        assert len(stored(await broker.publish(self.topic, [self.message(clock)]))) == 1

    async def test_bytes_are_bounded_too(self, opened: Opened, clock: Clock) -> None:
        """A message that does not fit is refused, a smaller one after it is not."""
        broker = await opened(bytes_max=100_000)
        large, small = b"{}" + bytes(80_000), b"{}"
        outcomes = await broker.publish(
            self.topic,
            [
                self.message(clock, payload=large),
                self.message(clock, payload=large),
                self.message(clock, payload=small),
            ],
        )
        assert [isinstance(found, Receipt) for found in outcomes] == [True, False, True]
        assert isinstance(outcomes[1], Overloaded)
        assert 80_000 < (await broker.depth(self.topic)).bytes <= 100_000
        await broker.ack((await self.take(broker)).claims)
        assert len(stored(await broker.publish(self.topic, [self.message(clock, payload=large)]))) == 1

    async def test_publishers_at_once_fill_a_topic_exactly(self, opened: Opened, clock: Clock) -> None:
        """A limit reached by many at once lets none through too many (nats-server#4247)."""
        broker = await opened(length_max=50)
        other = await opened(length_max=50) if broker.features.shared else broker
        calls = [
            (broker, other)[number % 2].publish(self.topic, [self.message(clock) for _ in range(7)])
            for number in range(20)
        ]
        ids = [id for outcomes in await asyncio.gather(*calls) for id in stored(outcomes)]
        assert len(ids) == len(set(ids)) == 50
        assert (await broker.depth(self.topic)).waiting == 50
        assert {claim.message.id for claim in (await self.take(broker)).claims} == set(ids)

    async def test_a_message_that_is_too_large_is_refused_and_others_are_not(
        self, broker: Broker, clock: Clock
    ) -> None:
        """A bad item never takes others with it."""
        large = self.too_large(clock)
        if large is None:
            pytest.skip("this engine takes messages of any size")
        small = self.message(clock)
        outcomes = await broker.publish(self.topic, [large, small])
        assert isinstance(outcomes[0], TooLarge)
        assert stored(outcomes) == [small.id]

    async def test_what_was_published_is_seen_by_others_at_once(self, opened: Opened, clock: Clock) -> None:
        """A receipt for what is still on its way would be a lie if this process died now."""
        broker = await opened()
        if not broker.features.shared:
            pytest.skip("this engine has one process")
        messages = await self.publish(broker, clock, 3)
        other = await opened()
        assert (await other.depth(self.topic)).waiting == 3
        claims = (await self.take(other)).claims
        assert [claim.message for claim in claims] == messages

    async def test_what_was_accepted_is_there_after_a_restart(self, opened: Opened, clock: Clock) -> None:
        """Waiting, claimed and settled messages, and keys."""
        broker = await opened()
        if not broker.features.durable:
            pytest.skip("this engine ends with its process")
        keyed = self.keyed(clock, "k", "1" * 64)
        await broker.publish(self.topic, [keyed])
        messages = await self.publish(broker, clock, 3)
        claims = (await self.take(broker, 3)).claims
        await broker.ack(claims[:2])
        await broker.close()
        broker = await opened()
        assert [claim.message for claim in (await self.take(broker)).claims] == messages[2:]
        await self.expire(clock)
        assert (await self.take_one(broker, alone=True)).message == messages[1]
        if broker.features.unique_publish:
            assert await broker.fingerprints([keyed.id]) == {keyed.id: "1" * 64}

    async def test_a_message_that_cannot_be_read_is_handed_out_for_the_consumer_to_give_up(
        self, broker: Broker, clock: Clock
    ) -> None:
        """With its id, its bytes as payload and no model; it is settled like any other, also when lost."""
        bad = self.message(clock, schema=SCHEMA + 1, payload=b"{}of tomorrow")
        good = self.message(clock)
        assert len(stored(await broker.publish(self.topic, [bad, good]))) == 2
        found = (await self.take(broker)).claims
        assert [claim.message.id for claim in found] == [bad.id, good.id]
        assert found[0].message.model == ""
        assert b"of tomorrow" in found[0].message.payload
        assert found[1].message == good
        if broker.features.look_up:
            assert await broker.find([bad.id]) == {bad.id}
            assert await broker.read(bad.id) is None
        await broker.ack(found[1:])
        await self.expire(clock)
        claim = await self.take_one(broker, alone=True)
        assert (claim.message.id, claim.message.model) == (bad.id, "")
        assert await broker.ack([claim]) == set()
        assert (await broker.depth(self.topic)).waiting == 0

    async def test_a_closed_broker_says_so(self, opened: Opened, clock: Clock) -> None:
        """Every call raises an error of ours, none hangs, and a publish has one outcome for each message."""
        broker = await opened()
        await broker.open()
        await self.publish(broker, clock, 1)
        claims = (await self.take(broker)).claims
        await broker.close()
        await broker.close()
        outcomes = await broker.publish(self.topic, [self.message(clock), self.message(clock)])
        assert [isinstance(found, HeadraceError) for found in outcomes] == [True, True]
        calls = [
            self.take(broker),
            broker.extend(claims, self.claim_ms),
            broker.ack(claims),
            broker.release(claims),
            broker.depth(self.topic),
            broker.health(),
            broker.fingerprints(["a"]),
            broker.forget([], 0),
        ]
        for call in calls:
            with pytest.raises(HeadraceError):
                await self.soon(call)
