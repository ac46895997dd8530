"""Results: what became of a request, told by its id, and the truth about ids that have none."""

from __future__ import annotations

import asyncio

from headrace.brokers.base import Broker
from headrace.clock import Clock
from headrace.errors import Cancelled, Expired, RequestNotFound
from headrace.message import Message, Result, check_id, id_time_ms
from headrace.services.door import RequestView
from headrace.services.feed import Feed
from headrace.services.outcomes import refused
from headrace.services.rendering import pending_view, view_of
from headrace.services.settings import ResultSettings
from headrace.stores.base import Store
from headrace.telemetry.logs import Logs

__all__ = ["ResultSettings", "Results"]


class Results:
    """The accepted requests behind the door (`door.Requests`)."""

    def __init__(
        self, broker: Broker, store: Store, secret: bytes, settings: ResultSettings, *, clock: Clock, logs: Logs
    ) -> None:
        """Read; `secret` is the one that ids are made with."""
        self._broker, self._store, self._secret = broker, store, secret
        self._ttl_ms, self._clock = int(settings.ttl_s * 1000), clock
        self.feed = Feed(store, clock, logs)

    async def look(self, id: str, wait_s: float) -> RequestView:
        """Return the state of a request, waiting up to `wait_s` for its result.

        Raises RequestNotFound, Expired, StoreUnavailable, BrokerUnavailable.
        """
        result = await self._find(id)
        if result is None and wait_s > 0:
            await self.feed.open()
            coming = self.feed.join(id)
            try:
                # It may have been committed before the feed began.
                result = await self._get(id) or await self.wait(id, coming, wait_s)
            finally:
                self.feed.leave(id, coming)
        return pending_view(id) if result is None else await self._view(result)

    async def wait(self, id: str, coming: asyncio.Future[Result], wait_s: float) -> Result | None:
        """Return the result that the feed brings within `wait_s`, else what the store has then, maybe nothing.

        Raises StoreUnavailable: a feed that is cut off must not make a finished request look pending.
        """
        try:
            async with asyncio.timeout(wait_s):
                return await coming
        except TimeoutError:
            return await self._get(id)

    async def cancel(self, id: str) -> RequestView:
        """Make `cancelled` the result if there is none yet; return what is the result. Raises as `look`."""
        result = await self._find(id)
        if result is None:
            message = await self._message(id)
            await self._store.commit([refused(message, Cancelled(), self._clock.now_ms())])
            result = await self._get(id)
            if result is None:
                # Our own commit, or the one that was first, is gone already: retention is very short here.
                raise Expired
        return await self._view(result)

    async def pull(self, cursor: str, limit: int) -> tuple[list[RequestView], str]:
        """Return finished requests in commit order after `cursor`, and the cursor to go on from.

        Raises InvalidRequest for a cursor we never gave, StoreUnavailable.
        """
        results, following = await self._store.after(cursor, limit)
        deliveries = await self._store.deliveries_of([result.id for result in results])
        return [view_of(result, deliveries.get(result.id, ())) for result in results], following

    async def state(self, id: str) -> Result | None:
        """Return the result, or None for an accepted request that has none yet. Raises as `look`."""
        return await self._find(id)

    async def close(self) -> None:
        """Stop the feed."""
        await self.feed.close()

    async def _view(self, result: Result) -> RequestView:
        return view_of(result, await self._store.deliveries(result.id))

    async def _get(self, id: str) -> Result | None:
        return (await self._store.get([id])).get(id)

    async def _find(self, id: str) -> Result | None:
        """Return the result, or None for an accepted request that has none yet. Raises for every other id."""
        kind = check_id(id, self._secret)
        if kind is None:
            raise RequestNotFound
        result = await self._get(id)
        if result is not None:
            return result
        if self._broker.features.look_up:
            if id in await self._broker.find([id]):
                return None
            # Neither: it was answered and acknowledged between the two looks, or it is gone, or it never was.
            result = await self._get(id)
            if result is not None:
                return result
        if kind == "keyed":
            if self._broker.features.look_up:
                # A keyed id carries no time, but it is told to nobody before its message is durable. So it was
                # accepted once, and has left with its result.
                raise Expired
            if id in await self._broker.fingerprints([id]):
                return None
            raise Expired
        if (id_time_ms(id) or 0) < self._clock.now_ms() - self._ttl_ms:
            raise Expired
        if self._broker.features.look_up:
            raise RequestNotFound
        # The check in the id says that we gave it; what an engine without look-up cannot say is where it is.
        return None

    async def _message(self, id: str) -> Message:
        """Return the accepted message, as far as it can be found."""
        message = await self._broker.read(id) if self._broker.features.look_up else None
        if message is not None:
            return message
        # On its way between topic and store, unreadable, or on an engine that cannot look: no model and no
        # destinations are known, and the result says as much as there is.
        accepted_at_ms = id_time_ms(id) or self._clock.now_ms()
        return Message(id=id, model="", signature="", accepted_at_ms=accepted_at_ms, header_length=0, payload=b"")
