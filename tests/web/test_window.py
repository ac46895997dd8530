from __future__ import annotations

from headrace.clock import ManualClock
from headrace.web.window import LATENCIES_MAX, Window


def fill(window: Window, clock: ManualClock, good: int, bad: int) -> None:
    for number in range(good + bad):
        window.record(clock.monotonic_s(), 1.0 + number, own_failure=number >= good)


def test_no_requests_are_healthy() -> None:
    window = Window(ManualClock(), 60)
    assert (window.status(), window.error_rate(), window.latency_p95_ms()) == ("ok", 0.0, None)


def test_below_twenty_requests_a_rate_means_nothing() -> None:
    clock = ManualClock()
    window = Window(clock, 60)
    fill(window, clock, 0, 19)
    assert window.status() == "ok"
    fill(window, clock, 0, 1)
    assert window.status() == "unhealthy"


def test_the_limits_are_over_five_and_over_ten_percent() -> None:
    for good, bad, status in [(95, 5, "ok"), (94, 6, "degraded"), (90, 10, "degraded"), (89, 11, "unhealthy")]:
        clock = ManualClock()
        window = Window(clock, 60)
        fill(window, clock, good, bad)
        assert window.status() == status, (good, bad)


async def test_what_is_older_than_the_window_is_forgotten() -> None:
    clock = ManualClock()
    window = Window(clock, 60)
    fill(window, clock, 0, 50)
    await clock.advance(59)
    assert window.status() == "unhealthy"
    await clock.advance(2)
    assert window.status() == "ok"
    assert window.latency_p95_ms() is None


async def test_it_keeps_no_more_than_one_entry_a_second() -> None:
    clock = ManualClock()
    window = Window(clock, 10)
    for _ in range(100):
        fill(window, clock, 3, 0)
        await clock.advance(0.5)
    assert len(window._seconds) <= 11


def test_the_percentile_is_a_latency_that_somebody_saw() -> None:
    clock = ManualClock()
    window = Window(clock, 60)
    fill(window, clock, 100, 0)
    assert window.latency_p95_ms() == 95.0
    for _ in range(2 * LATENCIES_MAX):
        window.record(clock.monotonic_s(), 7.0, own_failure=False)
    assert window.latency_p95_ms() == 7.0


def test_failures_and_lookups_have_no_say_in_the_percentile() -> None:
    clock = ManualClock()
    window = Window(clock, 60)
    window.record(0.0, 2.0, own_failure=False)
    window.record(0.0, None, own_failure=False)
    window.record(0.0, 9000.0, own_failure=True)
    assert window.latency_p95_ms() == 2.0
