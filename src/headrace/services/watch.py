"""The watch: looks every second at what ingest depends on: cards, broker, store, and the length of each line."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from headrace.brokers.base import Broker
from headrace.clock import Clock
from headrace.errors import HeadraceError
from headrace.services.catalog import Catalog
from headrace.services.drain import Drain
from headrace.services.outage import Outage
from headrace.stores.base import Store
from headrace.telemetry.logs import Logs
from headrace.telemetry.metrics import Metrics

__all__ = ["Watch"]

_INTERVAL_S = 1.0
#: Until everything is ready it looks more often: a client waits for that moment.
_INTERVAL_NOT_READY_S = 0.1
#: An answer that takes longer than this is none.
_PATIENCE_S = 5.0


class Watch:
    """What is known of the surroundings, refreshed in the background."""

    def __init__(
        self, broker: Broker, store: Store, catalog: Catalog, *, clock: Clock, metrics: Metrics, logs: Logs
    ) -> None:
        """Know nothing yet: not ready."""
        self._broker, self._store, self._catalog, self._clock, self._logs = broker, store, catalog, clock, logs
        self._outages = {"broker": Outage("broker", clock, logs), "store": Outage("store", clock, logs)}
        self._drains: dict[str, Drain] = {}
        self._waiting = metrics.gauge("headrace_topic_waiting")
        self._claimed = metrics.gauge("headrace_topic_claimed")
        self._oldest_s = metrics.gauge("headrace_topic_oldest_age_seconds")
        self._round = metrics.age("headrace_poll_age_seconds")("watch")
        self._refused: dict[str, str] = {}
        self._looked = False

    def drain(self, topic: str) -> Drain:
        """Return how a topic drains."""
        found = self._drains.get(topic)
        if found is None:
            found = self._drains[topic] = Drain(self._clock)
        return found

    def reasons(self) -> list[str]:
        """Return why requests would not be accepted and answered now; empty means that they would."""
        if not self._looked:
            return ["the service is starting"]
        away = [f"the {name}: {outage.error}" for name, outage in self._outages.items() if outage.lasts]
        return [*away, *self._catalog.reasons()]

    async def run(self) -> None:
        """Look for ever, until cancelled."""
        while True:
            try:
                await self.look()
            except Exception as error:
                self._logs.say("loop_failed", loop="watch", error=error)
            await self._clock.sleep(_INTERVAL_NOT_READY_S if self.reasons() else _INTERVAL_S)

    async def look(self) -> None:
        """Look once."""
        self._round.mark()
        await asyncio.to_thread(self._catalog.refresh)
        for card, reason in self._catalog.refused.items():
            if self._refused.get(card) != reason:
                self._logs.say("card_refused", card=card, reason=reason)
        self._refused = dict(self._catalog.refused)
        await self._check("broker", self._broker.health())
        await self._check("store", self._store.health())
        if not self._outages["broker"].lasts:
            await self._check("broker", self._measure())
        self._looked = True

    async def _measure(self) -> None:
        for topic in self._catalog.names():
            depth = await self._broker.depth(topic)
            self.drain(topic).sample(depth.waiting + depth.claimed)
            self._waiting(topic).set(depth.waiting)
            self._claimed(topic).set(depth.claimed)
            self._oldest_s(topic).set(depth.oldest_age_ms / 1000)

    async def _check(self, name: str, check: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await check
        except TimeoutError:
            self._outages[name].begin(HeadraceError(f"it has not answered for {_PATIENCE_S:g} seconds"))
        except HeadraceError as error:
            self._outages[name].begin(error)
        else:
            self._outages[name].over()
