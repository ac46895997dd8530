"""A sliding window over the latest requests: how many of them failed by our own fault, and how long they took."""

from __future__ import annotations

from collections import deque

from headrace.clock import Clock

__all__ = ["DEGRADED_RATE", "UNHEALTHY_RATE", "Window"]

DEGRADED_RATE = 0.05
UNHEALTHY_RATE = 0.10
#: Below this many requests a rate means nothing.
REQUESTS_MIN = 20
#: Latencies are kept one by one, for a true percentile; of the newest requests only.
LATENCIES_MAX = 8192


class Window:
    """Counts the last `window_s` seconds by the second; latencies of the newest answers are kept one by one."""

    def __init__(self, clock: Clock, window_s: int) -> None:
        """Begin empty."""
        self._clock = clock
        self._window_s = window_s
        #: [second, requests, own failures], oldest first; at most one per second of the window.
        self._seconds: deque[list[int]] = deque()
        self._latencies: deque[tuple[float, float]] = deque(maxlen=LATENCIES_MAX)

    def record(self, now_s: float, latency_ms: float | None, *, own_failure: bool) -> None:
        """Count one answer."""
        second = int(now_s)
        seconds = self._seconds
        if not seconds or seconds[-1][0] != second:
            seconds.append([second, 0, 0])
            while seconds[0][0] <= second - self._window_s:
                seconds.popleft()
        newest = seconds[-1]
        newest[1] += 1
        if own_failure:
            newest[2] += 1
        elif latency_ms is not None:
            self._latencies.append((now_s, latency_ms))

    def error_rate(self) -> float:
        """Return own failures per request; 0 below the least number of requests that means something."""
        oldest = int(self._clock.monotonic_s()) - self._window_s
        requests = failures = 0
        for second, count, failed in self._seconds:
            if second > oldest:
                requests += count
                failures += failed
        return failures / requests if requests >= REQUESTS_MIN else 0.0

    def status(self) -> str:
        """Return ok, degraded or unhealthy."""
        rate = self.error_rate()
        if rate > UNHEALTHY_RATE:
            return "unhealthy"
        return "degraded" if rate > DEGRADED_RATE else "ok"

    def latency_p95_ms(self) -> float | None:
        """Return the 95th percentile of answers without own failures, newest ones only; None without any."""
        oldest = self._clock.monotonic_s() - self._window_s
        values = sorted(latency for at_s, latency in self._latencies if at_s >= oldest)
        if not values:
            return None
        # The nearest-rank definition: a latency that somebody really saw.
        return round(values[max(0, -(-len(values) * 95 // 100) - 1)], 3)
