"""Adapters with one thing changed, and a log of the order in which results became durable and messages were removed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from headrace.brokers.base import Claim
from headrace.stores.base import Finished
from headrace.testing.history import History

__all__ = ["Around", "Switch", "watched"]


class Around:
    """Passes every call on to an adapter, but for the methods that the test replaces."""

    def __init__(self, inner: Any, **methods: Callable[..., Any]) -> None:
        self.inner = inner
        self.methods = methods

    def __getattr__(self, name: str) -> Any:
        return self.methods.get(name) or getattr(self.inner, name)


class Switch:
    """A dependency that can be turned off: every named method then raises."""

    def __init__(self, inner: Any, error: Callable[[], Exception], *names: str) -> None:
        self.inner, self.error, self.names = inner, error, names
        self.off = False
        self.refused = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if name not in self.names:
            return found

        async def guarded(*args: Any, **kwargs: Any) -> Any:
            if self.off:
                self.refused += 1
                raise self.error()
            return await found(*args, **kwargs)

        return guarded


def watched(broker: Any, store: Any, history: History) -> tuple[Any, Any]:
    """Return adapters that note in `history` when a result was durable and when a message was asked to be removed."""

    async def commit(finished: Sequence[Finished]) -> list[bool]:
        first: list[bool] = await store.commit(finished)
        for entry in finished:
            history.commit(entry.result.id)
        # Durable is not yet known: whoever acknowledges in between would be seen.
        await asyncio.sleep(0)
        return first

    async def ack(claims: Sequence[Claim]) -> set[str]:
        for claim in claims:
            history.ack(claim.message.id)
        lost: set[str] = await broker.ack(claims)
        return lost

    return Around(broker, ack=ack), Around(store, commit=commit)
