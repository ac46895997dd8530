"""The handler port: what the consumer hands claims to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.brokers.base import Claim
from headrace.stores.base import Finished

__all__ = ["Done", "Handler"]

#: Takes what becomes of a claim: what to write, or None to give the message back because it could not be run.
Done = Callable[[Claim, Finished | None], None]


class Handler(Protocol):
    """Turns claims into what is written for them."""

    def handle(self, claims: Sequence[Claim], done: Done) -> None:
        """Begin on all of them; call `done` once for each, on the loop, now or later."""

    def drop(self, claim: Claim) -> bool:
        """Do not call `done` for this claim any more; return whether its run has begun."""

    def working_since(self, claim: Claim) -> float | None:
        """Return when its run began, or while it waits, the oldest run before it (monotonic); from any thread."""
