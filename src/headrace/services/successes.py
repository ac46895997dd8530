"""The successes of delivery, written down as many at once as there are: one commit for a whole lot of answers."""

from __future__ import annotations

import asyncio

from headrace.clock import Clock
from headrace.errors import HeadraceError
from headrace.message import Dispatch
from headrace.services.outage import Outage
from headrace.stores.base import Store
from headrace.telemetry.logs import Logs

__all__ = ["Successes"]


class Successes:
    """What was delivered and is not written down yet."""

    def __init__(self, store: Store, outage: Outage, *, clock: Clock, logs: Logs, pause_s: float) -> None:
        """Begin with none; `pause_s` is the pause after a defect."""
        self._store = store
        self._outage = outage
        self._clock = clock
        self._logs = logs
        self._pause_s = pause_s
        self._waiting: list[tuple[Dispatch, int]] = []
        self._added = asyncio.Event()

    def add(self, dispatch: Dispatch, status: int) -> None:
        """Have one written down soon."""
        self._waiting.append((dispatch, status))
        self._added.set()

    async def run(self) -> None:
        """Write them down until cancelled, through every outage of the store."""
        while True:
            await self._added.wait()
            self._added.clear()
            try:
                await self.flush()
            except HeadraceError as error:
                self._added.set()
                await self._outage.failed(error)
            except Exception as error:
                self._added.set()
                self._logs.say("loop_failed", loop="delivery-recorder", error=error)
                await self._clock.sleep(self._pause_s)

    async def flush(self) -> None:
        """Write down what there is now. Raises what the store raises, and keeps it then."""
        batch, self._waiting = self._waiting, []
        if batch:
            try:
                await self._store.delivered(batch)
            except BaseException:
                self._waiting[:0] = batch
                raise
