"""How much to claim, and whose turn it is: the two decisions of the consumer that are not about settling."""

from __future__ import annotations

from headrace.clock import Clock

__all__ = ["Pace", "Turns"]


class Pace:
    """How many messages of one topic may be in the works at once: what this process sustains, measured.

    A claim should not wait long before it is run: another process could have it meanwhile, and all that waits here
    becomes suspect if we die. So the limit starts at one, doubles while claims come back quickly *or* while company
    costs them nothing (they share a batch), and shrinks when they queue up behind each other.
    """

    #: Company that makes a message slower than alone by less than this costs nothing.
    _FREE = 1.5
    #: Company that makes it slower than this is a line; two in a line take twice as long.
    _LINE = 1.8
    #: How many good rounds pass before a limit that was too high is tried again.
    _PATIENCE = 16

    def __init__(self, hold_s: float, limit_max: int) -> None:
        """Begin at one message; `hold_s` is how long a claim may well be held, `limit_max` the most at once."""
        self.limit = 1
        self._hold_s = hold_s
        self._limit_max = limit_max
        self._alone_s: float | None = None
        self._pause = 0

    def finished(self, count: int, took_s: float, full: bool) -> None:
        """Note that `count` messages came back, the slowest after `took_s`; `full`: the limit had been reached."""
        # Measured anew whenever the limit is back at one, as it is soon after a model has become slower.
        self._alone_s = took_s if self._alone_s is None or self.limit == 1 else min(self._alone_s, took_s)
        quick_s = max(self._hold_s / 2, self._FREE * self._alone_s)
        slow_s = max(self._hold_s, self._LINE * self._alone_s)
        if took_s > slow_s:
            self.limit = max(1, int(self.limit * quick_s / took_s))
            self._pause = self._PATIENCE
        elif full and took_s <= quick_s:
            if self._pause > 0:
                self._pause -= 1
            else:
                self.limit = min(self._limit_max, self.limit + max(1, count))


class Turns:
    """Whose turn it is: fresh messages, run in company, or suspects, each run alone in an empty process.

    Neither may starve the other: suspects get a slice of time, then fresh messages get at least as much as the
    suspects took, counted from when they could begin. Without the one, the other goes on.
    """

    #: How long one slice of suspects is, and how long a new process runs fresh messages first: should a suspect
    #: kill it again and again, the fresh messages still get something done in each life.
    SLICE_S = 0.5

    def __init__(self, clock: Clock) -> None:
        """Begin with fresh messages."""
        self._clock = clock
        self._since_s = clock.monotonic_s()
        self._fresh_s = self.SLICE_S
        self.suspects = False
        #: True: nothing fresh is claimed; once the process is empty, suspects are claimed one by one.
        self.alone = False

    def saw_fresh(self, count: int, suspects_waiting: int) -> None:
        """Note what a claim of fresh messages brought."""
        self.suspects = suspects_waiting > 0
        if self.suspects and (count == 0 or self._clock.monotonic_s() - self._since_s >= self._fresh_s):
            self._switch(alone=True)

    def saw_suspect(self, count: int, suspects_waiting: int) -> None:
        """Note what a claim of a suspect brought."""
        self.suspects = suspects_waiting > 0
        if count == 0:
            # Others took them; whatever is left is seen by the next claim of fresh messages.
            self._switch(alone=False)

    def ran_suspect(self) -> None:
        """Note that a suspect is done and settled, and the process empty again."""
        if not self.suspects or self._clock.monotonic_s() - self._since_s >= self.SLICE_S:
            self._switch(alone=False)

    def _switch(self, *, alone: bool) -> None:
        now_s = self._clock.monotonic_s()
        if not alone:
            self._fresh_s = now_s - self._since_s
        self._since_s = now_s
        self.alone = alone
