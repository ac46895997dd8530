"""When a child that died is started again."""

from __future__ import annotations

from headrace.supervise.restarts import DEATHS_MAX, KILLS_MAX, Restarts


def test_a_death_after_it_was_ready_is_followed_by_a_start_at_once_for_ever() -> None:
    restarts = Restarts()
    for _ in range(10_000):
        assert restarts.died(was_ready=True, killed=False) == 0.0


def test_deaths_before_it_was_ready_are_spaced_out_and_bounded() -> None:
    restarts = Restarts()
    pauses = [restarts.died(was_ready=False, killed=False) for _ in range(DEATHS_MAX)]
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0, None]


def test_having_been_ready_wipes_the_slate() -> None:
    restarts = Restarts()
    for _ in range(DEATHS_MAX - 1):
        assert restarts.died(was_ready=False, killed=False) is not None
    restarts.became_ready()
    assert restarts.died(was_ready=False, killed=False) == 0.1


def test_a_storm_of_kills_from_outside_is_outlived_and_not_waited_out_for_long() -> None:
    restarts = Restarts()
    pauses = [restarts.died(was_ready=False, killed=True) for _ in range(60)]
    assert None not in pauses
    assert max(pause for pause in pauses if pause is not None) == 1.0


def test_a_child_that_can_only_be_killed_is_given_up_in_the_end() -> None:
    restarts = Restarts()
    pauses = [restarts.died(was_ready=False, killed=True) for _ in range(KILLS_MAX)]
    assert pauses.index(None) == KILLS_MAX - 1
