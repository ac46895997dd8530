"""Retention: results leave when their time is over, and the memory of their keys with them."""

from __future__ import annotations

import asyncio

from headrace.brokers.base import Broker
from headrace.clock import Clock
from headrace.services.settings import ResultSettings
from headrace.stores.base import Store
from headrace.telemetry.logs import Logs
from headrace.telemetry.metrics import Metrics

__all__ = ["Retention"]

#: Results removed in one transaction; other writers get their turn between two.
_PAGE = 1000


class Retention:
    """Removes what is older than `ttl_s`, counted from acceptance."""

    def __init__(
        self, broker: Broker, store: Store, settings: ResultSettings, *, clock: Clock, metrics: Metrics, logs: Logs
    ) -> None:
        """Prepare."""
        self._broker, self._store, self._settings, self._clock, self._logs = broker, store, settings, clock, logs
        self._purged = metrics.counter("headrace_purged_total")()
        self._round = metrics.age("headrace_poll_age_seconds")("purge")

    async def run(self) -> None:
        """Purge for ever, until cancelled."""
        while True:
            self._round.mark()
            try:
                await self.purge()
            except asyncio.CancelledError:
                raise
            except Exception as error:
                # The store is away, most likely. Nothing is lost by being late.
                self._logs.say("loop_failed", loop="purge", error=error)
            await self._clock.sleep(self._settings.purge_interval_s)

    async def purge(self) -> int:
        """Remove all that is due; return how many results left.

        First the result, then the memory of its key: in between, the same key and request still gives the same id,
        and afterwards a new message. A result with a delivery to come stays, and its key with it.
        """
        accepted_before_ms = self._clock.now_ms() - int(self._settings.ttl_s * 1000)
        count = 0
        while True:
            ids = await self._store.purge(accepted_before_ms=accepted_before_ms, limit=_PAGE)
            if ids:
                await self._broker.forget(ids, 0)
            count += len(ids)
            if len(ids) < _PAGE:
                break
        # What a crash between the two steps left behind, with time for a result's last deliveries.
        await self._broker.forget((), accepted_before_ms - int(self._settings.ttl_s * 1000))
        if count:
            self._purged.add(count)
            self._logs.say("purged", results=count)
        return count
