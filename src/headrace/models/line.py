"""Who waits for one version's runners: oldest first, and beside it the same by what they may run with."""

from __future__ import annotations

from collections import deque

from headrace.errors import HeadraceError
from headrace.models.batch import Pending

__all__ = ["WaitingLine"]


class WaitingLine:
    """The line of a batcher, which adds to it itself: a call more for every request would show."""

    def __init__(self, size_max: int) -> None:
        """Begin with nobody; up to `size_max` rows are taken together."""
        #: Who waits, oldest first, and the same by what they may run with. Who was taken or left is passed over.
        self._line: deque[Pending] = deque()
        self._mates: dict[object, deque[Pending]] = {}
        self._gone = 0
        #: Parts of failed batches, which go first.
        self._again: deque[list[Pending]] = deque()
        self._size = size_max
        self._waiting_rows = self._waiting_bytes = 0
        #: Why nobody is let in; None while everybody is.
        self._refusal: HeadraceError | None = None
        #: When the last request came, in monotonic seconds; 0 before the first.
        self.used_s = 0.0

    @property
    def waiting_rows(self) -> int:
        """Return the rows that wait; 0 once everybody was taken or has gone."""
        return self._waiting_rows

    def refuse(self, error: HeadraceError | None) -> None:
        """Let nobody in from now on, but answer with this error; None lets everybody in again."""
        self._refusal = error

    def dismiss(self, error: HeadraceError) -> None:
        """Answer everybody who waits with this error; what runs goes on."""
        for pending in [*self._line, *(p for part in self._again for p in part)]:
            pending.waiting = False
            pending.refuse(error)
        self._line.clear()
        self._mates.clear()
        self._again.clear()
        self._waiting_rows = self._waiting_bytes = 0

    def left(self, pending: Pending) -> None:
        """Take note that somebody who waited has gone (called by Pending)."""
        self._waiting_rows -= pending.rows
        self._waiting_bytes -= pending.size
        self._gone += 1
        # While a run hangs, callers come and give up: their remains must not pile up behind it.
        if self._gone > 64 and self._gone * 2 > len(self._line):
            self._sweep()

    def _take(self) -> list[Pending]:
        while self._again:
            members = [pending for pending in self._again.popleft() if not pending.done()]
            if members:
                return members
        while self._line:
            first = self._line[0]
            if first.waiting:
                return self._with_mates(first)
            self._line.popleft()
        return []

    def _with_mates(self, first: Pending) -> list[Pending]:
        """Take the oldest and, in order, whoever may run with it, up to the number of rows."""
        members: list[Pending] = []
        if first.key is None:
            members.append(first)
        else:
            mates = self._mates[first.key]
            rows = 0
            while mates:
                pending = mates[0]
                if pending.waiting:
                    if members and rows + pending.rows > self._size:
                        break
                    members.append(pending)
                    rows += pending.rows
                mates.popleft()
            if not mates:
                del self._mates[first.key]
        for pending in members:
            pending.waiting = False
            self._waiting_rows -= pending.rows
            self._waiting_bytes -= pending.size
        line = self._line
        while line and not line[0].waiting:
            line.popleft()
        return members

    def _sweep(self) -> None:
        self._line = deque([pending for pending in self._line if pending.waiting])
        self._mates = {
            key: deque(kept)
            for key, mates in self._mates.items()
            if (kept := [pending for pending in mates if pending.waiting])
        }
        self._gone = 0
