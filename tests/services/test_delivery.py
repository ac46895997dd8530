"""Delivery on a clock of its own: every pair is delivered, due again or dead with a reason (A36)."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from random import Random
from typing import Any

import pytest

from headrace.clock import ManualClock
from headrace.errors import StoreUnavailable
from headrace.message import Dispatch, Result
from headrace.services.delivery import Delivery
from headrace.services.delivery_settings import DeliverySettings
from headrace.sinks import Sinks
from headrace.sinks.base import Outcome, Sink
from headrace.stores.base import Finished
from headrace.stores.memory import MemoryStore
from headrace.telemetry.logs import Logs
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.trace import Recorder, Tracer
from headrace.telemetry.writer import LineWriter

A, B, C = "http://a.example/hook", "http://b.example/hook", "http://c.example/hook"
OK = Outcome("delivered", 200)
FAILED = Outcome("retry", 500, "HTTP 500")
SILENT = Outcome("retry", None, "no answer", throttled=True)
EXACT = DeliverySettings(jitter=0.0)
#: For tests that see days pass.
LAZY = DeliverySettings(jitter=0.0, poll_s=60.0)
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

Script = Callable[[Dispatch], Awaitable[Outcome] | Outcome]


class ScriptedSink(Sink):
    """Does what the test says, and remembers what was sent when."""

    name = "scripted"
    schemes = ("http",)
    timeout_s = 15.0

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.script: Script = lambda dispatch: OK
        self.sent: list[Dispatch] = []
        self.times_s: list[float] = []
        self.at_once: Counter[str] = Counter()
        self.most_at_once: Counter[str] = Counter()

    def check(self, destination: str) -> None:
        pass

    async def send(self, dispatch: Dispatch, *, now_ms: int) -> Outcome:
        self.sent.append(dispatch)
        self.times_s.append(self.clock.monotonic_s())
        host = dispatch.destination.split("/")[2]
        self.at_once[host] += 1
        self.most_at_once[host] = max(self.most_at_once[host], self.at_once[host])
        try:
            outcome = self.script(dispatch)
            return outcome if isinstance(outcome, Outcome) else await outcome
        finally:
            self.at_once[host] -= 1

    def to(self, destination: str) -> list[Dispatch]:
        return [dispatch for dispatch in self.sent if dispatch.destination == destination]

    async def close(self) -> None:
        pass


class World:
    """A store, a sink and one delivery after the other."""

    def __init__(self, settings: DeliverySettings = EXACT) -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(self.clock)
        self.sink = ScriptedSink(self.clock)
        self.settings = settings
        self.fd = os.open(os.devnull, os.O_WRONLY)
        self.logs = Logs(self.clock, writer=LineWriter(self.fd))
        self.recorder = Recorder()
        self.metrics = Metrics(self.clock, instance="delivery")
        self.rounds = 0
        self.running: asyncio.Task[None] | None = None
        self.delivery: Delivery

    def start(self, **given: Any) -> None:
        def progress() -> None:
            self.rounds += 1

        self.delivery = Delivery(
            given.pop("store", self.store),
            Sinks([self.sink]),
            self.settings,
            clock=self.clock,
            metrics=self.metrics,
            logs=self.logs,
            rng=Random(1),
            tracer=Tracer(self.clock, [self.recorder]),
            progress=progress,
        )
        self.running = asyncio.create_task(self.delivery.run())

    async def kill(self) -> None:
        """End it as a SIGKILL would: nothing more is written."""
        assert self.running is not None
        for task in asyncio.all_tasks():
            if task is not asyncio.current_task():
                task.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        self.running = None

    async def close(self) -> None:
        if self.running is not None and not self.running.done():
            stopping = asyncio.create_task(self.delivery.stop())
            for _ in range(100):
                if stopping.done():
                    break
                await self.clock.advance(1)
            await stopping
        if self.running is not None:
            await self.running
        await self.store.close()
        self.logs.close()
        os.close(self.fd)

    async def finish(self, id: str, *destinations: str) -> None:
        result = Result(
            id=id,
            model="m",
            model_version="1",
            accepted_at_ms=self.clock.now_ms(),
            finished_at_ms=self.clock.now_ms(),
            attempts=1,
            traceparent=TRACE,
        )
        outbox = [(destination, f'{{"id":"{id}"}}'.encode()) for destination in destinations]
        assert await self.store.commit([Finished(result, outbox)]) == [True]

    async def until(self, true: Callable[[], bool], advance_s: float = 0.0) -> None:
        """Let things happen until `true`; the clock moves by `advance_s` each turn, and not at all by default."""
        for _ in range(2000):
            if true():
                return
            await self.clock.advance(advance_s)
        raise AssertionError("it never came true")

    async def state(self, id: str, destination: str = A) -> tuple[str, int, int | None, str | None]:
        for delivery in await self.store.deliveries(id):
            if delivery.destination == destination:
                return delivery.state, delivery.attempts, delivery.last_status, delivery.last_error
        raise AssertionError(f"no delivery of {id} to {destination}")

    async def until_state(self, id: str, state: str, destination: str = A, advance_s: float = 0.0) -> None:
        for _ in range(2000):
            if (await self.state(id, destination))[0] == state:
                return
            await self.clock.advance(advance_s)
        raise AssertionError(f"{id} is {await self.state(id, destination)}")

    def attempts(self, outcome: str) -> float:
        return self.metrics.counter("headrace_delivery_attempts_total")("scripted", outcome).value


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    await world.store.open()
    yield world
    await world.close()


async def test_a_result_is_delivered_once_and_that_is_written_down(world: World) -> None:
    await world.finish("m1", A)
    world.start()
    await world.until_state("m1", "delivered")
    assert await world.state("m1") == ("delivered", 1, 200, None)
    (sent,) = world.sink.sent
    assert (sent.id, sent.destination, sent.body, sent.attempt) == ("m1", A, b'{"id":"m1"}', 1)
    assert world.attempts("delivered") == 1
    await world.clock.advance(3600)
    assert len(world.sink.sent) == 1


async def test_a_commit_while_it_waits_is_delivered_without_waiting_for_the_poll(world: World) -> None:
    world.start()
    await world.until(lambda: world.rounds > 0)
    await world.finish("m1", A)
    await world.until_state("m1", "delivered")
    assert world.clock.monotonic_s() == 0


async def test_a36_a_receiver_that_fails_and_then_works_gets_it_by_the_schedule_under_one_id(world: World) -> None:
    outcomes = iter([FAILED, SILENT, OK])
    world.sink.script = lambda dispatch: next(outcomes)
    await world.finish("m1", A)
    world.start()
    await world.until_state("m1", "delivered", advance_s=1)
    assert len({sent.webhook_id for sent in world.sink.sent}) == 1
    assert len({sent.body for sent in world.sink.sent}) == 1
    assert [sent.attempt for sent in world.sink.sent] == [1, 2, 3]
    first, second, third = world.sink.times_s
    assert 5 <= second - first <= 5 + 2 * EXACT.poll_s
    assert 300 <= third - second <= 300 + 2 * EXACT.poll_s
    assert await world.state("m1") == ("delivered", 3, 200, None)


async def test_a36_a_pause_that_the_receiver_asks_for_is_kept(world: World) -> None:
    outcomes = iter([Outcome("retry", 429, "HTTP 429", retry_after_s=40, throttled=True), OK])
    world.sink.script = lambda dispatch: next(outcomes)
    await world.finish("m1", A)
    world.start()
    await world.until_state("m1", "delivered", advance_s=1)
    assert 40 <= world.sink.times_s[1] - world.sink.times_s[0] <= 42


async def test_a36_after_the_schedule_it_is_a_dead_letter_with_its_reason() -> None:
    world = World(LAZY)
    await world.store.open()
    world.sink.script = lambda dispatch: FAILED
    await world.finish("m1", A)
    world.start()
    await world.until_state("m1", "dead", advance_s=600)
    assert len(world.sink.sent) == 10
    assert await world.state("m1") == ("dead", 10, 500, "HTTP 500")
    ((letter,), _) = await world.store.dead_letters()
    assert (letter.kind, letter.id, letter.destination, letter.reason_code) == ("delivery", "m1", A, "undelivered")
    assert world.metrics.counter("headrace_dead_letters_total")("delivery", "undelivered").value == 1
    assert set(await world.store.get(["m1"])) == {"m1"}, "the result itself is there all the same"
    await world.close()


async def test_a36_a_receiver_that_is_gone_is_not_asked_again(world: World) -> None:
    world.sink.script = lambda dispatch: Outcome("gone", 410, "HTTP 410") if dispatch.destination == A else OK
    await world.finish("m1", A, B)
    world.start()
    await world.until_state("m1", "dead")
    await world.until_state("m1", "delivered", B)
    await world.finish("m2", A, B)
    await world.until_state("m2", "delivered", B)
    await world.clock.advance(10)
    assert (await world.state("m2"))[0] == "dead"
    assert len(world.sink.to(A)) == 1
    assert (await world.state("m1"))[1:3] == (1, 410)


async def test_what_can_never_be_sent_is_dead_at_once(world: World) -> None:
    world.sink.script = lambda dispatch: Outcome("refused", error="that address is not sent to (loopback)")
    await world.finish("m1", A)
    await world.finish("m2", "s3://bucket/none")
    world.start()
    await world.until_state("m1", "dead")
    await world.until_state("m2", "dead", "s3://bucket/none")
    letter = await world.store.dead_letter("m1", A)
    assert letter is not None
    assert (letter.reason_code, letter.reason) == ("refused", "that address is not sent to (loopback)")
    assert (await world.state("m2", "s3://bucket/none"))[3] == "there is no sink for that scheme"


async def test_one_failing_destination_does_not_send_again_to_the_others() -> None:
    world = World(LAZY)
    await world.store.open()
    world.sink.script = lambda dispatch: FAILED if dispatch.destination == B else OK
    await world.finish("m1", A, B, C)
    world.start()
    await world.until_state("m1", "dead", B, advance_s=600)
    assert Counter(sent.destination for sent in world.sink.sent) == {A: 1, B: 10, C: 1}
    await world.close()


async def test_attempts_are_bounded_even_if_each_one_kills_us_before_it_is_written_down(world: World) -> None:
    world.sink.script = lambda dispatch: asyncio.get_running_loop().create_future()
    await world.finish("m1", A)
    for life in range(1, 11):
        world.start()
        await world.until(lambda life=life: len(world.sink.sent) == life, advance_s=1)
        await world.kill()
    world.start()
    await world.until_state("m1", "dead", advance_s=1)
    assert len(world.sink.sent) == 10
    assert (await world.state("m1"))[3] == "every attempt ended without an outcome"


async def test_a_pair_in_hand_when_we_are_killed_is_sent_again_after_its_claim(world: World) -> None:
    world.sink.script = lambda dispatch: asyncio.get_running_loop().create_future()
    await world.finish("m1", A)
    world.start()
    await world.until(lambda: len(world.sink.sent) == 1)
    await world.kill()
    world.sink.script = lambda dispatch: OK
    world.start()
    await world.until_state("m1", "delivered", advance_s=1)
    claim_s = world.settings.hold_s + world.sink.timeout_s + 2
    assert claim_s <= world.sink.times_s[1] <= claim_s + 2
    assert world.sink.sent[0].webhook_id == world.sink.sent[1].webhook_id


# -- dead receivers and the others ------------------------------------------------------------------------


def never(dispatch: Dispatch) -> Awaitable[Outcome]:
    return asyncio.get_running_loop().create_future()


async def test_a36_a_receiver_that_never_answers_slows_nobody_else(world: World) -> None:
    world.sink.script = lambda dispatch: never(dispatch) if dispatch.destination == A else OK
    for number in range(500):
        await world.finish(f"dead{number}", A)
    for number in range(300):
        await world.finish(f"good{number}", B)
    world.start()
    await world.until(lambda: len(world.sink.to(B)) == 300)
    assert world.clock.monotonic_s() == 0, "no time had to pass"
    assert len(world.sink.to(A)) == EXACT.host_concurrency_max


async def test_a36_neither_does_a_dead_host_whose_destinations_all_differ(world: World) -> None:
    async def time_out() -> Outcome:
        await world.clock.sleep(15)
        return SILENT

    world.sink.script = lambda dispatch: time_out() if "dead" in dispatch.destination else OK
    for number in range(400):
        await world.finish(f"dead{number}", f"http://dead.example/{number}")
    for number in range(100):
        await world.finish(f"good{number}", f"http://good.example/{number}")
    world.start()
    await world.until(lambda: sum("good" in sent.destination for sent in world.sink.sent) == 100, advance_s=0.1)
    assert world.clock.monotonic_s() < 2 * EXACT.hold_s + 15
    assert world.sink.most_at_once["dead.example"] <= EXACT.host_concurrency_max


async def test_one_host_gets_no_more_at_once_than_its_share(world: World) -> None:
    async def slowly() -> Outcome:
        await world.clock.sleep(0.1)
        return OK

    world.sink.script = lambda dispatch: slowly()
    for number in range(300):
        await world.finish(f"m{number}", A if number % 2 else f"http://a.example/{number}")
    world.start()
    await world.until(lambda: world.attempts("delivered") == 300, advance_s=0.1)
    assert world.sink.most_at_once["a.example"] == EXACT.host_concurrency_max
    assert len(world.sink.sent) == 300
    assert world.clock.monotonic_s() < 300 / 16 * 0.1 + 3


async def test_all_together_are_no_more_at_once_than_the_limit() -> None:
    world = World(DeliverySettings(jitter=0.0, concurrency_max=10))
    await world.store.open()
    world.sink.script = lambda dispatch: asyncio.ensure_future(pause(world.clock))
    for number in range(50):
        await world.finish(f"m{number}", f"http://host{number}.example/")
    world.start()
    await world.until(lambda: len(world.sink.sent) == 10)
    await world.until(lambda: world.attempts("delivered") == 50, advance_s=1)
    assert world.clock.monotonic_s() >= 5
    await world.close()


async def pause(clock: ManualClock) -> Outcome:
    await clock.sleep(1)
    return OK


async def test_a_host_that_keeps_failing_is_only_probed_until_it_answers_again(world: World) -> None:
    world.sink.script = lambda dispatch: FAILED
    for number in range(200):
        await world.finish(f"m{number}", A)
    world.start()
    await world.clock.advance(20)
    assert len(world.sink.sent) < 16 + 20, "without the rule it would be 400"
    tried = len(world.sink.sent)
    world.sink.script = lambda dispatch: OK
    await world.until(lambda: world.attempts("delivered") == 200, advance_s=10)
    assert len(world.sink.sent) == tried + 200


@pytest.mark.parametrize("urls", [1, 300])
async def test_the_pairs_of_a_dead_host_come_to_their_end_without_being_sent_one_by_one(urls: int) -> None:
    """Else a backlog for a host that never comes back would stay for ever, and with it all of its results.

    What was not sent was no attempt, and its reason is the last real one, if there is one.
    """
    world = World(LAZY)
    await world.store.open()
    world.sink.script = lambda dispatch: SILENT
    pairs = [(f"m{number}", f"{A}/{number % urls}") for number in range(300)]
    for id, destination in pairs:
        await world.finish(id, destination)
    world.start()
    for id, destination in pairs:
        await world.until_state(id, "dead", destination, advance_s=3600)
    assert len(world.sink.sent) < 300 * 10 / 3
    assert world.clock.monotonic_s() < 2 * sum(EXACT.schedule_s)
    sent = Counter(dispatch.id for dispatch in world.sink.sent)
    letters = {letter.id: letter for letter in (await world.store.dead_letters(limit=1000))[0]}
    untried = 0
    for id, destination in pairs:
        _, attempts, status, error = await world.state(id, destination)
        assert attempts == letters[id].attempts == sent[id]
        assert (status, error) == (None, letters[id].reason)
        assert error is not None
        assert error.startswith("no answer" if sent[id] else "not tried: its ")
        untried += not sent[id]
    assert untried > 0
    await world.close()


async def test_where_somebody_answers_nothing_is_given_up_untried() -> None:
    """However long a destination answers with failures only: each pair gets every attempt of its schedule."""
    world = World(LAZY)
    await world.store.open()
    world.sink.script = lambda dispatch: FAILED
    for number in range(300):
        await world.finish(f"m{number}", A)
    world.start()
    for number in range(300):
        await world.until_state(f"m{number}", "dead", advance_s=3600)
        assert await world.state(f"m{number}") == ("dead", 10, 500, "HTTP 500")
    assert set(Counter(sent.id for sent in world.sink.sent).values()) == {10}
    assert world.clock.monotonic_s() < 2 * 80 * 3600
    await world.close()


@pytest.mark.parametrize(
    "failure",
    [FAILED, Outcome("retry", 404, "HTTP 404"), Outcome("retry", 429, "HTTP 429", throttled=True), SILENT],
    ids=["500", "404", "429", "silence"],
)
async def test_a_failing_path_gives_up_nothing_of_the_healthy_one_beside_it(failure: Outcome) -> None:
    world = World(DeliverySettings(jitter=0.0, schedule_s=(0.0, 0.5, 1.0, 2.0), throttle_s=0.5))
    await world.store.open()
    bad, good = "http://host.example/bad", "http://host.example/good"

    async def time_out() -> Outcome:
        await world.clock.sleep(15)
        return SILENT

    def behave(dispatch: Dispatch) -> Awaitable[Outcome] | Outcome:
        if dispatch.destination == good:
            return OK
        return time_out() if failure is SILENT else failure

    world.sink.script = behave
    world.start()
    for number in range(400):
        await world.finish(f"bad{number}", bad)
        if number % 6 == 0:
            await world.finish(f"good{number}", good)
        await world.clock.advance(1 / 30)
    goods = [f"good{number}" for number in range(0, 400, 6)]
    for id in goods:
        await world.until_state(id, "delivered", good, advance_s=0.5)
        assert await world.state(id, good) == ("delivered", 1, 200, None)
    for number in range(400):
        await world.until_state(f"bad{number}", "dead", bad, advance_s=5)
    await world.close()


async def test_one_host_is_not_doubted_for_one_path_that_hangs(world: World) -> None:
    """New pairs of another path do not wait for any probe."""
    world.sink.script = lambda dispatch: SILENT if dispatch.destination.endswith("/hang") else OK
    for number in range(50):
        await world.finish(f"bad{number}", "http://host.example/hang")
    world.start()
    await world.clock.advance(120)
    tried = len(world.sink.sent)
    assert tried < 50
    now_s = world.clock.monotonic_s()
    await world.finish("good", "http://host.example/good")
    await world.until_state("good", "delivered", "http://host.example/good")
    assert world.clock.monotonic_s() == now_s


async def test_nothing_is_given_up_untried_before_somebody_looked_after_its_time() -> None:
    """A host came back while it was shut: whoever's schedule was over meanwhile is sent all the same."""
    world = World(DeliverySettings(jitter=0.0, schedule_s=(0.0, 0.5)))
    await world.store.open()
    world.sink.script = lambda dispatch: SILENT
    world.start()
    for number in range(400):
        await world.finish(f"old{number}", A)
        await world.clock.advance(1)
    tried = len(world.sink.sent)
    world.sink.script = lambda dispatch: OK
    await world.finish("new", A)
    await world.until_state("new", "delivered", advance_s=1)
    assert tried < 400
    assert (await world.state("new"))[1] == 1
    await world.close()


async def test_the_last_real_answer_is_kept_when_later_tries_are_not_made() -> None:
    world = World(DeliverySettings(jitter=0.0, schedule_s=(0.0, 5.0, 300.0)))
    await world.store.open()
    moved = {f"m{number}": f"http://host.example/moved/{number}" for number in range(10)}
    world.sink.script = lambda dispatch: Outcome("retry", 301, "HTTP 301")
    for id, destination in moved.items():
        await world.finish(id, destination)
    world.start()
    await world.until(lambda: len(world.sink.sent) == 20, advance_s=1)
    world.sink.script = lambda dispatch: SILENT
    # Others find out that the host is dead, so hardly any of them is tried again.
    for number in range(500):
        await world.finish(f"other{number}", f"http://host.example/{number}")
        await world.clock.advance(1)
    untried = 0
    for id, destination in moved.items():
        tries = len(world.sink.to(destination))
        status, error = (
            (None, "no answer") if tries > 2 else (301, "HTTP 301; later not tried: its host does not answer")
        )
        assert await world.state(id, destination) == ("dead", tries, status, error)
        letter = await world.store.dead_letter(id, destination)
        assert letter is not None
        assert (letter.attempts, letter.reason) == (tries, error)
        untried += tries == 2
    assert untried > 5
    await world.close()


async def test_a_last_attempt_without_an_outcome_hides_no_real_answer() -> None:
    world = World(DeliverySettings(jitter=0.0, schedule_s=(0.0, 1.0)))
    await world.store.open()
    world.sink.script = lambda dispatch: FAILED if dispatch.attempt == 1 else never(dispatch)
    await world.finish("m1", A)
    world.start()
    await world.until(lambda: len(world.sink.sent) == 2, advance_s=0.5)
    await world.kill()
    world.start()
    await world.until_state("m1", "dead", advance_s=1)
    assert await world.state("m1") == ("dead", 2, 500, "HTTP 500; then without an outcome")
    await world.close()


async def test_a_pair_that_waited_too_long_for_a_slot_has_made_no_attempt() -> None:
    world = World(DeliverySettings(jitter=0.0, schedule_s=(0.0,), host_concurrency_max=1))
    await world.store.open()

    async def slowly() -> Outcome:
        await world.clock.sleep(14)
        return OK

    world.sink.script = lambda dispatch: slowly()
    for number in range(12):
        await world.finish(f"m{number}", A)
    world.start()
    for number in range(12):
        await world.until_state(f"m{number}", "delivered", advance_s=1)
        assert await world.state(f"m{number}") == ("delivered", 1, 200, None)
    await world.close()


async def test_a_defect_of_ours_is_not_held_against_the_receiver(world: World) -> None:
    def broken(dispatch: Dispatch) -> Outcome:
        raise ZeroDivisionError

    world.sink.script = broken
    for number in range(20):
        await world.finish(f"old{number}", f"{A}/{number}")
    world.start()
    await world.until(lambda: len(world.sink.sent) == 20)
    world.sink.script = lambda dispatch: OK
    await world.finish("new", A)
    await world.until_state("new", "delivered")


async def test_a_receiver_that_restarts_costs_what_comes_meanwhile_no_attempt(world: World) -> None:
    world.sink.script = lambda dispatch: FAILED
    for number in range(6):
        await world.finish(f"old{number}", A)
    world.start()
    await world.until(lambda: len(world.sink.sent) == 6)
    await world.finish("new", A)
    world.sink.script = lambda dispatch: OK
    await world.until_state("new", "delivered", advance_s=0.1)
    assert (await world.state("new"))[1] == 1
    assert world.clock.monotonic_s() < 3


# -- the store --------------------------------------------------------------------------------------------


class Flaky:
    """A store that is away while the test says so."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.away: set[str] = set()
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.store, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            if name in self.away:
                raise StoreUnavailable
            return await found(*args, **kwargs)

        return call


@pytest.mark.parametrize("call", ["claim_due", "delivered", "retry", "give_up", "wait_outbox"])
async def test_an_outage_of_the_store_loses_nothing_and_sends_nothing_twice(world: World, call: str) -> None:
    store = Flaky(world.store)
    store.away = {call}
    world.sink.script = lambda dispatch: {"ok": OK, "no": Outcome("refused", error="no")}.get(dispatch.id, FAILED)
    world.start(store=store)
    await world.finish("ok", A)
    await world.finish("no", B)
    await world.finish("again", C)
    await world.until(lambda: store.calls[call] >= 3, advance_s=0.1)
    store.away = set()
    await world.until_state("ok", "delivered", advance_s=0.1)
    await world.until_state("no", "dead", B, advance_s=0.1)
    await world.until(lambda: store.calls["retry"] >= 1, advance_s=0.1)
    assert Counter(sent.id for sent in world.sink.sent) == {"ok": 1, "no": 1, "again": 1}


async def test_many_successes_are_written_down_in_few_calls(world: World) -> None:
    store = Flaky(world.store)
    for number in range(300):
        await world.finish(f"m{number}", f"http://host{number % 40}.example/")
    world.start(store=store)
    await world.until(lambda: world.attempts("delivered") == 300)
    await world.until_state("m299", "delivered", "http://host19.example/")
    assert store.calls["delivered"] <= 30
    assert store.calls["claim_due"] <= 30


async def test_a_defect_in_a_sink_is_a_failed_attempt_and_not_the_end(world: World) -> None:
    def broken(dispatch: Dispatch) -> Outcome:
        raise ZeroDivisionError

    world.sink.script = broken
    await world.finish("m1", A)
    world.start()
    await world.until(lambda: len(world.sink.sent) == 2, advance_s=1)
    world.sink.script = lambda dispatch: OK
    await world.until_state("m1", "delivered", advance_s=10)


# -- stopping, replaying, tracing -------------------------------------------------------------------------


async def test_an_orderly_stop_finishes_what_is_being_sent_and_gives_back_the_rest(world: World) -> None:
    world.sink.script = lambda dispatch: asyncio.ensure_future(pause(world.clock))
    for number in range(40):
        await world.finish(f"m{number}", A)
    world.start()
    await world.until(lambda: len(world.sink.sent) == 16)
    stopping = asyncio.create_task(world.delivery.stop())
    await world.until(stopping.done, advance_s=0.5)
    states = Counter([(await world.state(f"m{number}"))[0] for number in range(40)])
    assert states == {"delivered": 16, "pending": 24}
    assert Counter([(await world.state(f"m{number}"))[1] for number in range(40)]) == {1: 16, 0: 24}
    world.start()
    await world.until(lambda: world.attempts("delivered") == 40, advance_s=0.5)
    assert world.clock.monotonic_s() < 10, "they did not have to wait for their claims to expire"
    assert len(world.sink.sent) == 40


async def test_a_stop_does_not_wait_for_a_receiver_that_hangs_longer_than_the_grace(world: World) -> None:
    cancelled = []

    async def hang(dispatch: Dispatch) -> Outcome:
        try:
            return await never(dispatch)
        except asyncio.CancelledError:
            cancelled.append(dispatch.id)
            raise

    world.sink.script = hang
    await world.finish("m1", A)
    world.start()
    await world.until(lambda: len(world.sink.sent) == 1)
    stopping = asyncio.create_task(world.delivery.stop())
    await world.until(stopping.done, advance_s=1)
    assert cancelled == ["m1"]
    assert EXACT.grace_s <= world.clock.monotonic_s() <= EXACT.grace_s + 2
    assert (await world.state("m1"))[:2] == ("pending", 1)


async def test_a_dead_delivery_that_is_replayed_keeps_its_id_and_begins_anew(world: World) -> None:
    world.sink.script = lambda dispatch: Outcome("gone", 410, "HTTP 410")
    await world.finish("m1", A)
    world.start()
    await world.until_state("m1", "dead")
    world.sink.script = lambda dispatch: OK
    assert await world.store.replay_delivery("m1", A, now_ms=world.clock.now_ms())
    await world.until_state("m1", "delivered", advance_s=1)
    first, second = world.sink.sent
    assert (first.webhook_id, first.body) == (second.webhook_id, second.body)
    assert second.attempt == 1


async def test_a29_each_attempt_is_a_span_in_the_trace_of_its_request(world: World) -> None:
    outcomes = iter([FAILED, OK])
    world.sink.script = lambda dispatch: next(outcomes)
    await world.finish("m1", A + "?key=secret")
    world.start()
    await world.until(lambda: len(world.recorder.records) == 2, advance_s=1)
    first, second = world.recorder.named("response_sent")
    trace_id, parent_id = TRACE.split("-")[1:3]
    assert [(span.trace_id, span.parent_id, span.attributes["attempt"]) for span in (first, second)] == [
        (trace_id, parent_id, 1),
        (trace_id, parent_id, 2),
    ]
    assert (first.error, second.error) == ("retry", None)
    assert world.sink.sent[0].traceparent == f"00-{trace_id}-{first.span_id}-01"
    assert "secret" not in str(first.attributes)


# -- everything at once -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
async def test_whatever_receivers_and_processes_do_every_pair_is_delivered_or_dead(seed: int) -> None:
    rng = Random(seed)
    world = World(DeliverySettings(schedule_s=(0.0, 2.0, 10.0, 60.0), host_concurrency_max=3, claim_count_max=8))
    await world.store.open()
    store = Flaky(world.store)
    moods = {f"http://h{host}.example/{path}": rng.random() for host in range(5) for path in range(2)}
    answered: set[tuple[str, str]] = set()

    async def behave(dispatch: Dispatch) -> Outcome:
        await world.clock.sleep(rng.random() * 3)
        if rng.random() < moods[dispatch.destination]:
            return rng.choice([FAILED, SILENT, Outcome("retry", 429, "HTTP 429", retry_after_s=rng.random() * 90)])
        if rng.random() < 0.02:
            return Outcome("gone", 410, "HTTP 410")
        answered.add((dispatch.id, dispatch.destination))
        return OK

    world.sink.script = behave
    pairs = []
    for number in range(60):
        destinations = rng.sample(sorted(moods), rng.randint(1, 3))
        await world.finish(f"m{number}", *destinations)
        pairs += [(f"m{number}", destination) for destination in destinations]
    world.start(store=store)
    for _ in range(30):
        await world.clock.advance(rng.random() * 8)
        chance = rng.random()
        if chance < 0.2:
            await world.kill()
            world.start(store=store)
        elif chance < 0.4:
            store.away = set(rng.sample(["claim_due", "delivered", "retry", "give_up", "disable", "wait_outbox"], 2))
        else:
            store.away = set()
    store.away = set()
    for id, destination in pairs:
        for _ in range(1000):
            state, attempts, _, error = await world.state(id, destination)
            if state != "pending":
                break
            await world.clock.advance(5)
        assert state in ("delivered", "dead"), (id, destination)
        assert state == "dead" or (id, destination) in answered
        assert attempts <= 4, "by the schedule; the claim that finds them used up is no attempt"
        assert state == "delivered" or error, "a dead letter has its reason"
    sent = Counter((dispatch.id, dispatch.destination) for dispatch in world.sink.sent)
    assert max(sent.values()) <= 4
    assert all(len({d.body for d in world.sink.sent if d.id == id}) <= 1 for id, _ in pairs)
    await world.close()
