"""The feed: new results in commit order, handed to whoever waits for them. One reader, however many wait."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from headrace.clock import Clock
from headrace.errors import HeadraceError
from headrace.message import Result
from headrace.services.outage import Outage
from headrace.stores.base import Store
from headrace.telemetry.logs import Logs

__all__ = ["Feed"]

_PAGE = 500
#: The store's hint may be lost; then a result is seen this much later.
_POLL_S = 1.0
#: For how long the feed goes on after its last waiter has gone: the next caller need not start it again.
_LINGER_S = 30.0


class Feed:
    """Results as they are committed. It runs while somebody waits, and a little longer."""

    def __init__(self, store: Store, clock: Clock, logs: Logs) -> None:
        """Prepare; nothing runs yet."""
        self._store, self._clock, self._logs = store, clock, logs
        self._outage = Outage("store", clock, logs)
        self._waiters: defaultdict[str, set[asyncio.Future[Result]]] = defaultdict(set)
        self._joined = 0
        self._used_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self._opening: asyncio.Task[str] | None = None
        self._hint: asyncio.Future[None] | None = None

    @property
    def waiters(self) -> int:
        """Return how many ids are waited for."""
        return len(self._waiters)

    async def open(self) -> None:
        """Return once every result that is committed from now on will be seen. Raises StoreUnavailable."""
        self._used_s = self._clock.monotonic_s()
        if self._task is None or self._task.done():
            if self._opening is None or self._opening.done():
                self._opening = asyncio.create_task(self._store.latest())
            # Many may open it at once; that one of them is cancelled is not the others' affair.
            cursor = await asyncio.shield(self._opening)
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._run(cursor))

    def join(self, id: str) -> asyncio.Future[Result]:
        """Wait for the result of `id`: the future of one that is committed after `open` returned."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiters[id].add(future)
        self._joined += 1
        self._used_s = self._clock.monotonic_s()
        return future

    def leave(self, id: str, future: asyncio.Future[Result]) -> None:
        """Wait no longer."""
        waiters = self._waiters.get(id)
        if waiters is not None:
            waiters.discard(future)
            if not waiters:
                del self._waiters[id]
        future.cancel()

    async def close(self) -> None:
        """Stop; whoever still waits goes on waiting in vain, until their own time is over."""
        tasks = [task for task in (self._task, self._opening) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, cursor: str) -> None:
        try:
            while self._waiters or self._clock.monotonic_s() - self._used_s < _LINGER_S:
                try:
                    cursor = await self._step(cursor)
                    self._outage.over()
                except HeadraceError as error:
                    await self._outage.failed(error)
                except Exception as error:
                    self._logs.say("loop_failed", loop="feed", error=error)
                    await self._clock.sleep(_POLL_S)
        finally:
            if self._hint is not None:
                self._hint.cancel()
                self._hint = None

    async def _step(self, cursor: str) -> str:
        if self._hint is None:
            # Listening begins before looking: what is committed in between must not ring in vain.
            self._hint = asyncio.ensure_future(self._store.wait_results(_POLL_S))
            await asyncio.sleep(0)
        if self._waiters:
            results, cursor = await self._store.after(cursor, _PAGE)
            for result in results:
                for future in self._waiters.pop(result.id, ()):
                    if not future.done():
                        future.set_result(result)
            if len(results) < _PAGE:
                await self._hear()
            return cursor
        # Nobody waits: what is committed meanwhile need not be read. But somebody who joins while we ask for the
        # newest cursor may wait for a result that lies before it.
        joined = self._joined
        newest = await self._store.latest()
        if joined == self._joined:
            cursor = newest
            await self._hear()
        return cursor

    async def _hear(self) -> None:
        hint, self._hint = self._hint, None
        if hint is not None:
            await hint
