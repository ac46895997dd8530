"""The receivers, as delivery sees them: how much each host has in hand, and which do not answer, or only with failures.

A dead receiver must slow nobody else, and a broken one nobody on its own host. So each origin (scheme, host and port)
has a few slots, and what keeps failing is shut for a while and then tried with one single send: a destination (URL)
that answers with failures, or not at all; and a whole origin where several destinations in a row did not answer. Any
HTTP answer, whatever it says, proves that the origin answers.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from random import Random
from urllib.parse import urlsplit

from headrace.clock import Clock
from headrace.message import Dispatch
from headrace.sinks.base import Outcome

__all__ = ["Gate", "Origin", "Origins"]

#: Failures in a row after which a gate is shut.
_FAILURES_MAX = 5
_SHUT_S_FIRST = 1.0
#: Times in a row that it was shut after which what is behind it counts as dead; before, pairs wait for the next probe,
#: so that a receiver that is restarting delays them as little as can be.
_SHUTS_DEAD = 4
_SHUT_S_MAX = 60.0
#: Destinations remembered per origin, to keep a shut one's pairs from being claimed.
_DESTINATIONS_MAX = 1000
#: How long a failure is remembered that nothing followed: longer than the longest pause between two attempts, or each
#: attempt of a dead host's last pair would seem to be its first failure.
_REMEMBER_S = 30 * 3600.0


class Gate:
    """What lets sends pass while they work, and one at a time, with growing pauses, while they do not."""

    def __init__(self, clock: Clock, rng: Random) -> None:
        """Begin open."""
        self._clock = clock
        self._rng = rng
        self._failures = 0
        self._shuts = 0
        self._shut_until_s = float("-inf")
        self._tried_s = float("-inf")
        #: The last failure was no answer at all.
        self.silent = False

    @property
    def open(self) -> bool:
        """Return whether everything may pass."""
        return not self._shuts

    @property
    def shut(self) -> bool:
        """Return whether nothing may pass now; neither open nor shut, one may pass to find out."""
        return self._clock.monotonic_s() < self._shut_until_s

    @property
    def dead(self) -> bool:
        """Return whether it has failed for so long that pairs should not wait for the next probe."""
        return self._shuts >= _SHUTS_DEAD

    @property
    def opens_in_s(self) -> float | None:
        """Return the seconds until one may pass; None if it is not shut."""
        left_s = self._shut_until_s - self._clock.monotonic_s()
        return left_s if left_s > 0 else None

    @property
    def forgettable(self) -> bool:
        """Return whether there is nothing to remember, or it was long ago."""
        return not self._failures or self._clock.monotonic_s() - self._tried_s > _REMEMBER_S

    def tried_within(self, seconds: float) -> bool:
        """Return whether the last send that failed began no longer ago than that."""
        return self._clock.monotonic_s() - self._tried_s <= seconds

    def passed(self) -> None:
        """Note that a send worked."""
        self._failures = self._shuts = 0
        self._shut_until_s = float("-inf")

    def failed(self, took_s: float, *, silent: bool) -> None:
        """Note that a send failed."""
        self._tried_s = self._clock.monotonic_s() - took_s
        self.silent = silent
        self._failures += 1
        if (self._failures >= _FAILURES_MAX or self._shuts) and not self.shut:
            self._shuts += 1
            pause_s = min(_SHUT_S_MAX, _SHUT_S_FIRST * 2.0 ** min(self._shuts - 1, 16))
            self._shut_until_s = self._clock.monotonic_s() + pause_s * (0.75 + 0.5 * self._rng.random())


class Origin:
    """One host's share."""

    def __init__(self, clock: Clock, rng: Random, *, slots: int, hold_s: float) -> None:
        """Begin open; `slots` sends at once, and no more held than it can send within `hold_s`."""
        self._clock = clock
        self._rng = rng
        self._slots = slots
        self._hold_s = hold_s
        self._took_s = 0.0
        self._full = False
        self._sending: Counter[str] = Counter()
        #: Shut while the host does not answer.
        self.gate = Gate(clock, rng)
        #: The gates of destinations whose last send failed.
        self.failing: dict[str, Gate] = {}
        #: Claimed and waiting for a slot, with when that began.
        self.held: deque[tuple[Dispatch, float]] = deque()
        self.destinations: dict[str, None] = {}
        #: The last claim left its destinations out.
        self.left_out = False

    @property
    def sending(self) -> int:
        """Return how many of its pairs are being sent."""
        return self._sending.total()

    @property
    def doubtful(self) -> bool:
        """Return whether its pairs may be claimed, but after those of hosts that answer.

        Either one of them may be sent to find out, or it has not answered for so long that they should not wait.
        """
        if self.gate.shut:
            return self.gate.dead
        return not self.gate.open and not self._sending and not self.held

    @property
    def idle(self) -> bool:
        """Return whether there is nothing to remember of it."""
        in_hand = self._sending or self.held
        return not in_hand and self.gate.forgettable and not self.failing

    @property
    def has_slot(self) -> bool:
        """Return whether one more can be sent now."""
        return self.sending < (self._slots if self.gate.open else 1)

    def stopped_by(self, destination: str, *, overdue: bool) -> Gate | None:
        """Return the gate that keeps a pair from being sent now; None if there is none.

        A destination that answers, though with failures, is not spared what is `overdue`: nothing is given up
        untried where there is somebody to try.
        """
        if self.gate.shut:
            return self.gate
        gate = self.failing.get(destination)
        if gate is None or gate.open or (overdue and not gate.silent):
            return None
        return gate if gate.shut or self._sending[destination] else None

    def room(self) -> int:
        """Return how many more of its pairs may be claimed; 0 while it is full or emptying, or did not answer."""
        if not self.gate.open:
            return 0
        in_hand = self.sending + len(self.held)
        # Claiming in larger lots is cheaper, so a full one is left alone until it is half empty.
        if self._full and (self.held or self.sending > self._slots // 2):
            return 0
        ahead = self._slots * self._hold_s / 2 / self._took_s if self._took_s else float("inf")
        room = int(min(self._slots + ahead, 1e6)) - in_hand
        self._full = room <= 0 or in_hand >= self._slots
        return 0 if self._full else room

    def leave_out(self, busy: set[str], doubtful: set[str]) -> int:
        """Add the destinations not to be claimed, and those to be claimed after the others'; return `room`."""
        room = self.room()
        self.left_out = room <= 0
        if self.left_out:
            (doubtful if self.doubtful else busy).update(self.destinations)
        for destination, gate in self.failing.items():
            if not gate.open:
                late = gate.dead if gate.shut else not self._sending[destination]
                (doubtful if late else busy).add(destination)
        return room

    def take(self, dispatch: Dispatch) -> None:
        """Remember its destination."""
        self.destinations.pop(dispatch.destination, None)
        self.destinations[dispatch.destination] = None
        if len(self.destinations) > _DESTINATIONS_MAX:
            oldest = next(iter(self.destinations))
            del self.destinations[oldest]
            self.failing.pop(oldest, None)

    def began(self, destination: str) -> None:
        """Note that a send begins."""
        self._sending[destination] += 1

    def ended(self, destination: str) -> None:
        """Note that a send is over."""
        self._sending[destination] -= 1
        if not self._sending[destination]:
            del self._sending[destination]

    def finished(self, destination: str, outcome: Outcome, took_s: float) -> bool:
        """Note what became of one send; return whether it opened a gate, so that more can be claimed."""
        if outcome.kind == "refused":
            # We would not send it, which says nothing about the receiver.
            return False
        self._took_s = took_s if not self._took_s else 0.8 * self._took_s + 0.2 * took_s
        silent = outcome.status is None
        was_open = self.gate.open
        if not silent or outcome.kind != "retry":
            self.gate.passed()
        opened = self.gate.open and not was_open
        if outcome.kind != "retry":
            gate = self.failing.pop(destination, None)
            return opened or (gate is not None and not gate.open)
        gate = self.failing.get(destination)
        # One path that hangs is no dead host: before it is doubted, different ones must stay silent, and one that is
        # shut by itself says nothing more about it.
        if silent and (gate is None or (gate.open and not self.gate.open)):
            self.gate.failed(took_s, silent=True)
        if gate is None:
            gate = self.failing[destination] = Gate(self._clock, self._rng)
            self.destinations.setdefault(destination)
        gate.failed(took_s, silent=silent)
        return opened

    def forget(self) -> None:
        """Drop the failures of long ago."""
        for destination in [destination for destination, gate in self.failing.items() if gate.forgettable]:
            del self.failing[destination]


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

    def plan(self, count: int) -> tuple[int, set[str], set[str]]:
        """Return how many pairs to claim, at most `count`; the destinations not to be claimed; and the doubtful ones.

        Doubtful ones come after the others, but not never: one of their pairs finds out whether they answer now, and
        if not the rest waits longer, and in the end goes to the dead letters.
        """
        busy: set[str] = set()
        doubtful: set[str] = set()
        for origin in self:
            room = origin.leave_out(busy, doubtful)
            if room > 0:
                # The store knows no hosts, so all that it hands out may be for this one.
                count = min(count, room)
        return count, busy, doubtful

    def opens_in_s(self) -> float:
        """Return the seconds until the next gate opens; infinite if none is shut."""
        gates = (gate for origin in self for gate in (origin.gate, *origin.failing.values()))
        return min((left_s for gate in gates if (left_s := gate.opens_in_s) is not None), default=float("inf"))

    def forget_idle(self) -> None:
        """Drop what there is nothing to remember of."""
        for origin in self:
            origin.forget()
        for key in [key for key, origin in self._known.items() if origin.idle]:
            del self._known[key]
