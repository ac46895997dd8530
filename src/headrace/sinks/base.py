"""The sink port: one way to send a frozen body to one destination, once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from headrace.message import Dispatch

__all__ = ["Outcome", "Sink"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one attempt. Exactly one of the first four kinds."""

    #: "delivered", "retry" (may work later), "gone" (the receiver wants no more: disable it), "refused" (it can
    #: never work from here: a blocked address, an impossible URL).
    kind: str
    status: int | None = None
    error: str = ""
    #: What the receiver asked for, unclamped; None if it did not.
    retry_after_s: float | None = None
    #: True where the receiver is overloaded: the next attempt waits at least a penalty.
    throttled: bool = False


class Sink(ABC):
    """Sends to the destinations of some URL schemes."""

    #: One word; a label of metrics.
    name: str
    schemes: tuple[str, ...]
    #: `send` returns within this, and a moment.
    timeout_s: float

    @abstractmethod
    def check(self, destination: str) -> None:
        """Raise InvalidRequest if `destination` can never be sent to; opens no connection (used at ingest)."""

    @abstractmethod
    async def send(self, dispatch: Dispatch, *, now_ms: int) -> Outcome:
        """Send once; never raises for what the receiver does. Bounded in time and in bytes read."""

    @abstractmethod
    async def close(self) -> None:
        """Close connections."""
