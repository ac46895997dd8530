"""Dead letters, reached from outside of the services: broker and store are opened for one visit."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from headrace.assembly.instance import CannotStart, engines, run_loop
from headrace.brokers import Broker
from headrace.clock import Clock, SystemClock
from headrace.errors import HeadraceError
from headrace.message import new_id
from headrace.settings import RootSettings, Settings
from headrace.stores import DeadLetter, Store

__all__ = ["Letters", "open_letters"]

T = TypeVar("T")

_PAGE = 500


class Letters:
    """The dead letters of one deployment."""

    def __init__(self, broker: Broker, store: Store, clock: Clock) -> None:
        """Look at an open broker and store."""
        self._broker, self._store, self._clock = broker, store, clock

    async def list(self, after: str, limit: int) -> tuple[list[DeadLetter], str]:
        """Return dead letters after a cursor, oldest first, and the cursor to go on from."""
        return await self._store.dead_letters(after=after, limit=limit)

    async def find(self, id: str, destination: str | None) -> DeadLetter:
        """Return one; without a destination the message, or else its only dead delivery. Raises CannotStart."""
        letter = await self._store.dead_letter(id, destination)
        if letter is None and destination is None:
            dead = [each.destination for each in await self._store.deliveries(id) if each.state == "dead"]
            if len(dead) > 1:
                raise CannotStart(f"{id} has several dead deliveries; name one with --destination: {', '.join(dead)}")
            if dead:
                letter = await self._store.dead_letter(id, dead[0])
        if letter is None:
            raise CannotStart(f"there is no dead letter {id}" + (f" to {destination}" if destination else ""))
        return letter

    async def replay(self, id: str, destination: str | None) -> str | None:
        """Try one again; return the new id of a message, None for a delivery. Raises CannotStart, HeadraceError."""
        letter = await self.find(id, destination)
        now_ms = self._clock.now_ms()
        if letter.kind == "delivery":
            assert letter.destination is not None
            if not await self._store.replay_delivery(id, letter.destination, now_ms=now_ms):
                raise CannotStart(f"the delivery of {id} to {letter.destination} is not dead any more")
            return None
        if letter.message is None or not letter.message.model:
            raise CannotStart(f"the message {id} cannot be read, so it cannot be run again")
        message = msgspec.structs.replace(
            letter.message,
            id=new_id(now_ms, await self._store.secret("ids")),
            accepted_at_ms=now_ms,
            expires_at_ms=None,
            # The key still stands for the old request.
            fingerprint=None,
            replay_of=id,
        )
        (outcome,) = await self._broker.publish(message.model, [message])
        if isinstance(outcome, HeadraceError):
            raise outcome
        await self._store.mark_replayed(id, message.id)
        return message.id


def open_letters(settings: Settings, work: Callable[[Letters], Awaitable[T]]) -> T:
    """Open broker and store, do the work, close them; return what it returned. Raises CannotStart, HeadraceError."""
    root = settings[RootSettings]
    for url in (root.broker_url, root.store_url):
        scheme, _, rest = url.partition(":///")
        # To open it would make it, and an empty one answers every question with "none".
        if scheme == "sqlite" and not Path(rest).exists():
            raise CannotStart(f"there is no database at {rest}; --data names the folder that `up` has")
    found: list[T] = []

    async def visit() -> int:
        clock = SystemClock()
        async with engines(settings, clock) as (broker, store):
            found.append(await work(Letters(broker, store, clock)))
        return 0

    run_loop(visit())
    return found[0]
