"""The receivers' hosts, as delivery sees them: how much each has in hand, and whether it answers at all.

A dead receiver must slow nobody else. So each origin (scheme, host and port; destinations of one host may all differ)
has a few slots of its own, and one that keeps failing is shut for a while and then tried with one single send.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from random import Random
from urllib.parse import urlsplit

from headrace.clock import Clock
from headrace.message import Dispatch
from headrace.sinks.base import Outcome

__all__ = ["Origin", "Origins"]

#: Failures in a row after which an origin is shut.
_FAILURES_MAX = 5
_SHUT_S_FIRST = 1.0
#: Times in a row that it was shut after which it counts as dead; before, its pairs wait for the next probe, so that a
#: receiver that is restarting costs them no attempt.
_SHUTS_DEAD = 4
_SHUT_S_MAX = 60.0
#: Destinations remembered per origin, to keep a shut one's pairs from being claimed.
_DESTINATIONS_MAX = 1000


class Origin:
    """One host's share."""

    def __init__(self, clock: Clock, rng: Random, *, slots: int, hold_s: float) -> None:
        """Begin open; `slots` sends at once, and no more held than it can send within `hold_s`."""
        self._clock = clock
        self._rng = rng
        self._slots = slots
        self._hold_s = hold_s
        self._failures = 0
        self._shuts = 0
        self._shut_until_s = float("-inf")
        self._took_s = 0.0
        self._full = False
        self.sending = 0
        #: Claimed and waiting for a slot, with when that began.
        self.held: deque[tuple[Dispatch, float]] = deque()
        self.destinations: dict[str, None] = {}
        #: The last claim left its destinations out.
        self.left_out = False

    @property
    def shut(self) -> bool:
        """Return whether nothing is sent there now."""
        return self._clock.monotonic_s() < self._shut_until_s

    @property
    def doubtful(self) -> bool:
        """Return whether its pairs may be claimed, but after those of hosts that answer.

        Either one of them may be sent to find out, or it has not answered for so long that they should not wait.
        """
        if self.shut:
            return self._shuts >= _SHUTS_DEAD
        return self._shuts > 0 and not self.sending and not self.held

    @property
    def opens_in_s(self) -> float | None:
        """Return the seconds until it may be probed; None if it is not shut."""
        left_s = self._shut_until_s - self._clock.monotonic_s()
        return left_s if left_s > 0 else None

    @property
    def idle(self) -> bool:
        """Return whether there is nothing to remember of it."""
        return not self.sending and not self.held and not self._failures

    @property
    def has_slot(self) -> bool:
        """Return whether one more can be sent now."""
        return self.sending < (1 if self._shuts else self._slots)

    def room(self) -> int:
        """Return how many more of its pairs may be claimed; 0 while it is full or emptying, or did not answer."""
        if self._shuts:
            return 0
        in_hand = self.sending + len(self.held)
        # Claiming in larger lots is cheaper, so a full one is left alone until it is half empty.
        if self._full and (self.held or self.sending > self._slots // 2):
            return 0
        ahead = self._slots * self._hold_s / 2 / self._took_s if self._took_s else float("inf")
        room = int(min(self._slots + ahead, 1e6)) - in_hand
        self._full = room <= 0 or in_hand >= self._slots
        return 0 if self._full else room

    def take(self, dispatch: Dispatch) -> None:
        """Remember its destination."""
        self.destinations.pop(dispatch.destination, None)
        self.destinations[dispatch.destination] = None
        if len(self.destinations) > _DESTINATIONS_MAX:
            del self.destinations[next(iter(self.destinations))]

    def finished(self, outcome: Outcome, took_s: float) -> None:
        """Note what became of one send."""
        self._took_s = took_s if not self._took_s else 0.8 * self._took_s + 0.2 * took_s
        if outcome.kind != "retry" or (outcome.status is not None and outcome.status < 500 and outcome.status != 429):
            # Whatever it answered, it answers.
            self._failures = self._shuts = 0
            self._shut_until_s = float("-inf")
            return
        self._failures += 1
        if (self._failures >= _FAILURES_MAX or self._shuts) and not self.shut:
            self._shuts += 1
            pause_s = min(_SHUT_S_MAX, _SHUT_S_FIRST * 2.0 ** min(self._shuts - 1, 16))
            self._shut_until_s = self._clock.monotonic_s() + pause_s * (0.75 + 0.5 * self._rng.random())


class Origins:
    """Every origin that there is something to remember of."""

    def __init__(self, clock: Clock, rng: Random, *, slots: int, hold_s: float) -> None:
        """Begin with none."""
        self._clock = clock
        self._rng = rng
        self._slots = slots
        self._hold_s = hold_s
        self._known: dict[str, Origin] = {}

    def __iter__(self) -> Iterator[Origin]:
        return iter(self._known.values())

    def of(self, destination: str) -> Origin:
        """Return the origin of a destination."""
        parts = urlsplit(destination)
        key = f"{parts.scheme}://{parts.netloc}".lower()
        origin = self._known.get(key)
        if origin is None:
            origin = self._known[key] = Origin(self._clock, self._rng, slots=self._slots, hold_s=self._hold_s)
        return origin

    def forget_idle(self) -> None:
        """Drop what there is nothing to remember of."""
        for key in [key for key, origin in self._known.items() if origin.idle]:
            del self._known[key]
