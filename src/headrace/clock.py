"""Time: the only file that reads it or sleeps, so that a test can own it."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from typing import Protocol

__all__ = ["Clock", "ManualClock", "SystemClock"]


class Clock(Protocol):
    """Where every room gets its time from."""

    def now_ms(self) -> int:
        """Return wall-clock milliseconds since 1970; may jump."""

    def monotonic_s(self) -> float:
        """Return seconds that never go back; only differences mean something."""

    async def sleep(self, delay_s: float) -> None:
        """Return after `delay_s` seconds of this clock."""


class SystemClock:
    """The machine's own clock."""

    def now_ms(self) -> int:
        """Return wall-clock milliseconds since 1970."""
        return time.time_ns() // 1_000_000

    def monotonic_s(self) -> float:
        """Return seconds of the machine's monotonic clock."""
        return time.monotonic()

    async def sleep(self, delay_s: float) -> None:
        """Sleep on the event loop."""
        await asyncio.sleep(delay_s)


class ManualClock:
    """A clock that stands still until a test moves it."""

    def __init__(self, start_ms: int = 1_800_000_000_000) -> None:
        self._wall_ms = float(start_ms)
        self._monotonic_s = 0.0
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now_ms(self) -> int:
        """Return the wall time that the test has set."""
        return int(self._wall_ms)

    def monotonic_s(self) -> float:
        """Return the seconds that the test has let pass."""
        return self._monotonic_s

    async def sleep(self, delay_s: float) -> None:
        """Wait until the test has moved the clock by `delay_s`."""
        if delay_s <= 0:
            await asyncio.sleep(0)
            return
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._monotonic_s + delay_s, next(self._order), woken))
        await woken

    def jump(self, delta_s: float) -> None:
        """Move the wall clock alone, as an administrator or NTP would; no time passes."""
        self._wall_ms += delta_s * 1000

    async def advance(self, delta_s: float) -> None:
        """Let `delta_s` pass, waking sleepers in order and letting each run before the next."""
        end = self._monotonic_s + delta_s
        await self._settle()
        while self._sleepers and self._sleepers[0][0] <= end:
            due, _, woken = heapq.heappop(self._sleepers)
            self._move_to(due)
            if not woken.done():
                woken.set_result(None)
            await self._settle()
        self._move_to(end)

    def _move_to(self, monotonic_s: float) -> None:
        step = max(0.0, monotonic_s - self._monotonic_s)
        self._monotonic_s += step
        self._wall_ms += step * 1000

    async def _settle(self) -> None:
        # A woken task may wake others in turn; a few turns of the loop let the chain run out.
        for _ in range(10):
            await asyncio.sleep(0)
