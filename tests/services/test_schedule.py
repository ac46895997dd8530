"""When a failed delivery is tried again (A36)."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.services.schedule import RETRY_AFTER_S_MAX, STANDARD_S, Schedule
from headrace.sinks.base import Outcome

FAILED = Outcome("retry", 500)
EXACT = Schedule(jitter=0.0)


def test_the_default_is_the_example_of_standard_webhooks() -> None:
    delays = [EXACT.next_s(attempt, FAILED, Random(1)) for attempt in range(1, 11)]
    assert delays == [5, 300, 1800, 7200, 18_000, 36_000, 50_400, 72_000, 86_400, None]
    assert sum(STANDARD_S) == pytest.approx(75.6 * 3600, rel=0.01)
    assert [EXACT.used_up(attempt) for attempt in (1, 10, 11)] == [False, False, True]


@given(st.integers(1, 12), st.integers(), st.floats(0, 1))
def test_a_delay_is_spread_by_the_jitter_and_no_more(attempt: int, seed: int, jitter: float) -> None:
    delay_s = Schedule(jitter=jitter).next_s(attempt, FAILED, Random(seed))
    if attempt >= 10:
        assert delay_s is None
    else:
        base_s = STANDARD_S[attempt]
        assert delay_s is not None
        assert base_s * (1 - jitter) - 1e-6 <= delay_s <= base_s * (1 + jitter) + 1e-6


def test_two_that_failed_together_do_not_come_back_together() -> None:
    rng = Random(1)
    assert len({Schedule().next_s(1, FAILED, rng) for _ in range(100)}) == 100


@pytest.mark.parametrize(
    ("attempt", "asked_s", "delay_s"),
    [(1, 3, 5), (1, 60, 60), (1, 1e12, RETRY_AFTER_S_MAX), (1, 0, 5), (4, 60, 7200), (5, 1e12, 18_000)],
)
def test_a36_retry_after_lengthens_the_delay_up_to_an_hour_and_never_shortens_it(
    attempt: int, asked_s: float, delay_s: float
) -> None:
    assert EXACT.next_s(attempt, Outcome("retry", 429, retry_after_s=asked_s, throttled=True), Random(1)) == delay_s


@given(st.integers(1, 9), st.floats(0, 1e300), st.integers())
def test_nobody_is_asked_earlier_than_they_said_or_later_than_the_bound(
    attempt: int, asked_s: float, seed: int
) -> None:
    delay_s = Schedule().next_s(attempt, Outcome("retry", 503, retry_after_s=asked_s), Random(seed))
    assert delay_s is not None
    assert delay_s >= min(asked_s, RETRY_AFTER_S_MAX)
    assert delay_s <= max(RETRY_AFTER_S_MAX, STANDARD_S[attempt] * 1.2)


def test_what_cannot_be_tried_waits_for_the_next_time_of_the_schedule() -> None:
    schedule = Schedule((0.0, 5.0, 300.0), jitter=0.0)
    assert schedule.whole_s == 305
    ages_s = (0, 4, 5, 304, 305, 1e9)
    assert [schedule.put_off_s(age_s, Random(1)) for age_s in ages_s] == [5, 1, 300, 1, None, None]


@given(st.floats(0, 1e6), st.integers())
def test_it_waits_no_shorter_and_not_much_longer(age_s: float, seed: int) -> None:
    exact_s = EXACT.put_off_s(age_s, Random(seed))
    spread_s = Schedule().put_off_s(age_s, Random(seed))
    if exact_s is None:
        assert spread_s is None
    else:
        assert spread_s is not None
        assert exact_s <= spread_s <= exact_s * 1.2 + 1e-6


def test_an_overloaded_receiver_gets_a_pause() -> None:
    assert EXACT.next_s(1, Outcome("retry", 504, throttled=True), Random(1)) == 30
    assert EXACT.next_s(2, Outcome("retry", 504, throttled=True), Random(1)) == 300
    assert EXACT.next_s(1, Outcome("retry", 429, retry_after_s=7, throttled=True), Random(1)) == 7


def test_a_schedule_of_one_step_has_one_attempt() -> None:
    assert Schedule((0.0,)).next_s(1, FAILED, Random(1)) is None
