"""What every store test stands on: how to get a store, and results to commit."""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace.clock import Clock, ManualClock
from headrace.message import Dispatch, ErrorRecord, Message, Result
from headrace.stores.base import Finished, Store

__all__ = ["NOW_MS", "Opened", "StoreBench"]

#: Times are passed in, so the tests have a time of their own.
NOW_MS = 1_800_000_000_000
#: Everything that should happen "soon" happens within this, however slow the machine; nothing waits so long.
SOON_S = 20.0

#: Opens a store; called again in one test, it opens what another process would open. All are closed at the end.
Opened = Callable[[], Awaitable[Store]]


class StoreBench(ABC):
    """The hooks of the suite, and the steps that its tests share."""

    pytestmark = pytest.mark.asyncio

    claim_ms = 10_000

    @abstractmethod
    def connect(self, folder: Path, clock: Clock) -> Store:
        """Return a store that is not opened yet; with the same folder, what another process would have."""

    @pytest.fixture
    def clock(self) -> Clock:
        """Return the clock handed to the adapter."""
        return ManualClock(NOW_MS)

    @pytest_asyncio.fixture
    async def opened(self, tmp_path: Path, clock: Clock) -> AsyncIterator[Opened]:
        """Return the opener of stores of this test."""
        stores: list[Store] = []

        async def open_one() -> Store:
            store = self.connect(tmp_path, clock)
            stores.append(store)
            await store.open()
            return store

        yield open_one
        for store in stores:
            await store.close()

    @pytest_asyncio.fixture
    async def store(self, opened: Opened) -> Store:
        """Return an open store."""
        return await opened()

    def result(self, id: str, **changes: Any) -> Result:
        """Return a result, succeeded unless `changes` give an error."""
        given: dict[str, Any] = {
            "id": id,
            "model": "fraud",
            "model_version": "1",
            "accepted_at_ms": NOW_MS,
            "finished_at_ms": NOW_MS,
            "attempts": 1,
            "request_id": "r-1",
            "header_length": 2,
            "payload": b"{}" + id.encode(),
        }
        return Result(**(given | changes))

    def finished(self, id: str, *destinations: str, **changes: Any) -> Finished:
        """Return a finished message that goes to those destinations."""
        return Finished(self.result(id, **changes), [(url, f"{id} for {url}".encode()) for url in destinations])

    def dead(self, id: str, **changes: Any) -> Finished:
        """Return a message that was given up on."""
        error = ErrorRecord(code="model_failed", message="It died three times", details={"attempts_alone": 3})
        message = Message(
            id=id, model="fraud", signature="s" * 32, accepted_at_ms=NOW_MS, header_length=2, payload=b"{}\x00"
        )
        return Finished(self.result(id, error=error, header_length=0, payload=b"", **changes), (), message)

    async def due(
        self, store: Store, *, now_ms: int = NOW_MS, count_max: int = 100, busy: Sequence[str] = ()
    ) -> list[Dispatch]:
        """Claim what is due."""
        return await store.claim_due(now_ms=now_ms, claim_ms=self.claim_ms, count_max=count_max, busy=busy)

    async def one_due(self, store: Store, *, now_ms: int = NOW_MS) -> Dispatch:
        """Claim exactly one pair, which must be due."""
        found = await self.due(store, now_ms=now_ms)
        assert len(found) == 1
        return found[0]

    async def soon(self, waited: Awaitable[Any]) -> Any:
        """Await what must not take long, so that a hang is a failure and no timeout of the runner."""
        return await asyncio.wait_for(waited, SOON_S)

    async def read_all(self, store: Store, limit: int = 3) -> list[str]:
        """Read all ids through the cursor, a few at a time."""
        ids: list[str] = []
        cursor = ""
        for _ in itertools.repeat(None, 10_000):
            page, cursor = await store.after(cursor, limit)
            if not page:
                return ids
            ids += [found.id for found in page]
        raise AssertionError("the cursor never came to an end")
