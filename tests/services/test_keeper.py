from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from headrace.brokers.base import Claim
from headrace.clock import ManualClock, SystemClock
from headrace.errors import BrokerUnavailable
from headrace.services.keeper import Keeper
from services.messages import claim


class Notes:
    """A broker's `extend_blocking` that notes what it was asked for, and everything the keeper said."""

    def __init__(self) -> None:
        self.extended: list[tuple[set[str], int]] = []
        self.lost: set[str] = set()
        self.overrun: list[str] = []
        self.errors: list[Exception] = []
        self.answer: Callable[[], set[str]] = set

    def extend(self, claims: Sequence[Claim], claim_ms: int) -> set[str]:
        self.extended.append(({claim.token for claim in claims}, claim_ms))
        return self.answer()

    def keeper(self, clock: ManualClock | SystemClock, **changes: object) -> Keeper:
        given = {"claim_s": 10.0, "run_s_max": 300.0, "working_since": lambda claim: None}
        return Keeper(
            self.extend,
            clock,
            **(given | changes),  # type: ignore[arg-type]
            on_lost=self.lost.update,
            on_overrun=self.overrun.extend,
            on_error=self.errors.append,
        )


async def beats(keeper: Keeper, clock: ManualClock, seconds: float) -> None:
    for _ in range(int(seconds / 2.5)):
        await clock.advance(2.5)
        keeper.beat()


async def test_A30_a_claim_is_extended_before_it_expires_for_as_long_as_the_work_goes_on() -> None:
    clock, notes = ManualClock(), Notes()
    keeper = notes.keeper(clock)
    keeper.hold([claim(token="a")], clock.monotonic_s(), 10_000)
    expires_s = 10.0
    for _ in range(40):
        before = len(notes.extended)
        await beats(keeper, clock, 2.5)
        if len(notes.extended) > before:
            assert clock.monotonic_s() < expires_s
            expires_s = clock.monotonic_s() + 10
    assert notes.extended[0] == ({"a"}, 10_000)
    assert expires_s > clock.monotonic_s()
    assert not notes.overrun


async def test_a_claim_that_is_fresh_or_settled_costs_nothing() -> None:
    clock, notes = ManualClock(), Notes()
    keeper = notes.keeper(clock)
    keeper.hold([claim(token="a"), claim(token="b")], clock.monotonic_s(), 10_000)
    await beats(keeper, clock, 2.5)
    keeper.let_go(["a", "b"])
    await beats(keeper, clock, 100)
    assert notes.extended == []


async def test_the_time_a_claim_took_to_arrive_counts_against_it() -> None:
    clock, notes = ManualClock(), Notes()
    keeper = notes.keeper(clock)
    asked_s = clock.monotonic_s()
    await clock.advance(5)
    keeper.hold([claim(token="a")], asked_s, 10_000)
    keeper.beat()
    assert notes.extended == [({"a"}, 10_000)]


async def test_A30_work_beyond_its_limit_is_reported_once_and_its_claim_extended_no_more() -> None:
    clock, notes = ManualClock(), Notes()
    keeper = notes.keeper(clock, run_s_max=30.0)
    keeper.hold([claim(token="a")], clock.monotonic_s(), 10_000)
    await beats(keeper, clock, 30)
    assert notes.overrun == []
    await beats(keeper, clock, 5)
    assert notes.overrun == ["a"]
    extended = len(notes.extended)
    await beats(keeper, clock, 60)
    assert (notes.overrun, len(notes.extended)) == (["a"], extended)


async def test_waiting_behind_runs_that_end_in_time_is_not_beyond_the_limit() -> None:
    clock, notes = ManualClock(), Notes()
    keeper = notes.keeper(clock, run_s_max=30.0, working_since=lambda claim: clock.monotonic_s() - 20)
    keeper.hold([claim(token="a")], clock.monotonic_s(), 10_000)
    await beats(keeper, clock, 300)
    assert notes.overrun == []


async def test_a_result_that_waits_for_the_store_keeps_its_claim_without_a_limit() -> None:
    clock, notes = ManualClock(), Notes()
    keeper = notes.keeper(clock, run_s_max=30.0)
    keeper.hold([claim(token="a")], clock.monotonic_s(), 10_000)
    keeper.computed("a")
    await beats(keeper, clock, 300)
    assert notes.overrun == []
    assert len(notes.extended) >= 50


async def test_a_lost_claim_is_reported_and_forgotten() -> None:
    clock, notes = ManualClock(), Notes()
    keeper = notes.keeper(clock)
    keeper.hold([claim(token="a"), claim(token="b")], clock.monotonic_s(), 10_000)
    notes.answer = lambda: {"a"}
    await beats(keeper, clock, 5)
    notes.answer = set
    await beats(keeper, clock, 5)
    assert notes.lost == {"a"}
    assert notes.extended[-1][0] == {"b"}


async def test_a_claim_that_was_settled_during_the_extension_is_not_lost() -> None:
    clock, notes = ManualClock(), Notes()
    keeper = notes.keeper(clock)
    keeper.hold([claim(token="a")], clock.monotonic_s(), 10_000)

    def settled_meanwhile() -> set[str]:
        keeper.let_go(["a"])
        return {"a"}

    notes.answer = settled_meanwhile
    await beats(keeper, clock, 5)
    assert notes.lost == set()


async def test_a_broker_that_is_away_costs_a_beat() -> None:
    clock, notes = ManualClock(), Notes()
    keeper = notes.keeper(clock)
    keeper.hold([claim(token="a")], clock.monotonic_s(), 10_000)

    def away() -> set[str]:
        raise BrokerUnavailable

    notes.answer = away
    await beats(keeper, clock, 5)
    notes.answer = set
    await beats(keeper, clock, 2.5)
    assert len(notes.errors) == 1
    assert len(notes.extended) == 2


class Silent(SystemClock):
    """A clock by which any two looks are far apart: a thread that was kept from running sees just that."""

    def __init__(self) -> None:
        self.looks = 0

    def monotonic_s(self) -> float:
        self.looks += 1
        return self.looks * 20.0


def test_a_process_that_falls_silent_claims_for_longer_than_its_silence() -> None:
    """Code that holds the interpreter's lock stops every thread; the next claims must outlive that."""
    notes = Notes()
    keeper = notes.keeper(Silent(), claim_s=0.2)
    assert keeper.claim_ms == 200
    keeper.start()
    beaten = threading.Event()
    notes.answer = lambda: (beaten.set(), set())[1]  # type: ignore[func-returns-value]
    keeper.hold([claim(token="a")], -1000, 200)
    assert beaten.wait(10)
    keeper.stop()
    assert keeper.claim_ms > 3 * 15_000


def test_the_thread_extends_while_nothing_else_calls_the_keeper() -> None:
    notes = Notes()
    extended = threading.Event()
    notes.answer = lambda: (extended.set(), set())[1]  # type: ignore[func-returns-value]
    keeper = notes.keeper(SystemClock(), claim_s=0.2)
    keeper.start()
    keeper.hold([claim(token="a")], SystemClock().monotonic_s(), 200)
    assert extended.wait(10)
    keeper.stop()
    assert notes.errors == []
