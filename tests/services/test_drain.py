from __future__ import annotations

from headrace.clock import ManualClock
from headrace.services.drain import Drain


async def test_a_line_that_nobody_measured_yet_sends_away_for_a_second() -> None:
    assert Drain(ManualClock()).send_away() == 1.0


async def test_the_rate_is_what_was_accepted_and_is_not_there_any_more() -> None:
    clock = ManualClock()
    drain = Drain(clock)
    drain.sample(100)
    drain.accepted(500)
    await clock.advance(10)
    drain.sample(200)
    assert drain.rate == 40.0


async def test_callers_that_are_sent_away_are_spread_over_the_time_in_which_places_become_free() -> None:
    clock = ManualClock()
    drain = Drain(clock)
    drain.sample(1000)
    drain.accepted(100)
    await clock.advance(10)
    drain.sample(1000)  # ten a second leave, ten a second come
    told = [drain.send_away() for _ in range(100)]
    assert told[0] == 1.0
    assert told[-1] == 10.0
    assert told == sorted(told)


async def test_places_that_became_free_meanwhile_shorten_the_wait_of_the_next() -> None:
    clock = ManualClock()
    drain = Drain(clock)
    drain.sample(1000)
    drain.accepted(100)
    await clock.advance(10)
    drain.sample(1000)
    for _ in range(100):
        drain.send_away()
    await clock.advance(5)
    assert drain.send_away() == 5.1


async def test_a_line_that_nothing_leaves_sends_away_for_as_long_as_that_was_watched() -> None:
    clock = ManualClock()
    drain = Drain(clock)
    drain.sample(1000)
    await clock.advance(60)
    drain.sample(1000)
    assert drain.send_away() == 30.0


async def test_only_the_latest_past_counts() -> None:
    clock = ManualClock()
    drain = Drain(clock)
    drain.sample(1000)
    for _ in range(60):
        await clock.advance(1)
        drain.sample(1000)
    for _ in range(60):
        drain.accepted(20)
        await clock.advance(1)
        drain.sample(1000)
    assert drain.rate == 20.0
