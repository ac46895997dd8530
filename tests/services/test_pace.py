from __future__ import annotations

from headrace.clock import ManualClock
from headrace.services.pace import Pace, Turns


def rounds(pace: Pace, took: object, count: int) -> None:
    """Let full rounds come back; `took` says how long one takes at a limit."""
    for _ in range(count):
        pace.finished(pace.limit, took(pace.limit), True)  # type: ignore[operator]


def test_a_process_begins_with_one_message() -> None:
    assert Pace(0.1, 1000).limit == 1


def test_a_fast_model_is_given_as_much_as_comes_back_in_half_the_hold() -> None:
    pace = Pace(0.1, 1000)
    rounds(pace, lambda limit: limit / 4000, 100)
    assert 100 <= pace.limit <= 400


def test_a_slow_model_that_gains_nothing_by_company_keeps_one_message_at_a_time() -> None:
    pace = Pace(2.5, 1000)
    seen = []
    for _ in range(50):
        pace.finished(pace.limit, 30.0 * pace.limit, True)
        seen.append(pace.limit)
    assert max(seen) <= 2
    assert seen.count(1) > 40


def test_a_slow_model_that_runs_sixteen_as_fast_as_one_is_given_sixteen() -> None:
    pace = Pace(2.5, 1000)
    rounds(pace, lambda limit: 5.0 * -(-limit // 16), 40)
    assert 8 <= pace.limit <= 32


def test_a_model_that_becomes_slow_is_soon_given_less() -> None:
    pace = Pace(0.1, 1000)
    rounds(pace, lambda limit: 0.001, 20)
    assert pace.limit == 1000
    rounds(pace, lambda limit: limit * 1.0, 5)
    assert pace.limit == 1


def test_a_limit_that_was_not_reached_does_not_grow() -> None:
    pace = Pace(0.1, 1000)
    for _ in range(50):
        pace.finished(1, 0.001, False)
    assert pace.limit == 1


async def test_suspects_wait_for_the_first_slice_of_a_new_process_while_there_is_fresh_work() -> None:
    clock = ManualClock()
    turns = Turns(clock)
    turns.saw_fresh(10, 1)
    assert not turns.alone
    await clock.advance(Turns.SLICE_S)
    turns.saw_fresh(10, 1)
    assert turns.alone


async def test_suspects_have_their_turn_at_once_where_nothing_else_waits() -> None:
    turns = Turns(ManualClock())
    turns.saw_fresh(0, 1)
    assert turns.alone


async def test_neither_starves_the_other() -> None:
    clock = ManualClock()
    turns = Turns(clock)
    spent = {"fresh": 0.0, "alone": 0.0}
    for _ in range(2000):
        if turns.alone:
            turns.saw_suspect(1, 100)
            await clock.advance(0.02)
            spent["alone"] += 0.02
            turns.ran_suspect()
        else:
            turns.saw_fresh(10, 100)
            await clock.advance(0.01)
            spent["fresh"] += 0.01
    assert 0.4 < spent["alone"] / sum(spent.values()) < 0.6


async def test_fresh_messages_get_as_long_as_one_slow_suspect_took() -> None:
    clock = ManualClock()
    turns = Turns(clock)
    turns.saw_fresh(0, 2)
    turns.saw_suspect(1, 1)
    await clock.advance(30)
    turns.ran_suspect()
    assert not turns.alone
    await clock.advance(29)
    turns.saw_fresh(1, 1)
    assert not turns.alone
    await clock.advance(1)
    turns.saw_fresh(1, 1)
    assert turns.alone


async def test_suspects_that_others_took_end_the_turn() -> None:
    turns = Turns(ManualClock())
    turns.saw_fresh(0, 1)
    turns.saw_suspect(0, 0)
    assert not turns.alone
