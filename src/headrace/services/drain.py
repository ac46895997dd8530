"""How fast a topic drains, and what that means for those who find it full."""

from __future__ import annotations

from collections import deque

from headrace.clock import Clock

__all__ = ["Drain"]

#: The rate is taken over this much of the past.
_WINDOW_S = 30.0
#: What somebody is told who finds a line that nothing has left for the whole window.
_RETRY_S_MAX = 3600.0


class Drain:
    """One topic, as one ingest sees it: what it accepted against how long the line is.

    Several ingests on one topic each know only what they accepted themselves, so each takes the line to drain slower
    than it does, and sends callers away for longer; never for too short.
    """

    def __init__(self, clock: Clock) -> None:
        """Begin without any past."""
        self._clock = clock
        self._accepted = 0
        #: (when, accepted until then, length of the line then)
        self._samples: deque[tuple[float, int, int]] = deque()
        #: Callers that were sent away and will be back: they come before whoever is sent away next.
        self._sent_away = 0.0
        self._sent_at_s = clock.monotonic_s()

    def accepted(self, count: int = 1) -> None:
        """Note messages that were accepted."""
        self._accepted += count

    def sample(self, length: int) -> None:
        """Note how long the line is now, waiting and claimed messages together."""
        now_s = self._clock.monotonic_s()
        self._samples.append((now_s, self._accepted, length))
        while len(self._samples) > 2 and self._samples[1][0] < now_s - _WINDOW_S:
            self._samples.popleft()

    @property
    def rate(self) -> float | None:
        """Return the messages that leave in a second; None while that is not known."""
        if len(self._samples) < 2:
            return None
        (then_s, accepted_then, length_then), (now_s, accepted, length) = self._samples[0], self._samples[-1]
        if now_s <= then_s:
            return None
        return max(0.0, (accepted - accepted_then) - (length - length_then)) / (now_s - then_s)

    def send_away(self) -> float:
        """Return after how many seconds (at least 1) a caller that finds the line full should find room.

        Places become free one by one. Everybody who is sent away is given the next place that nobody sent away
        before has been given, so they do not all come back at once.
        """
        now_s = self._clock.monotonic_s()
        rate = self.rate
        length = self._samples[-1][2] if self._samples else 0
        if rate is None:
            return 1.0
        if rate == 0.0:
            return _WINDOW_S
        freed = rate * (now_s - self._sent_at_s)
        # Some come back and are sent away again; the whole line's worth is as far ahead as anyone can see.
        self._sent_away = min(max(0.0, self._sent_away - freed) + 1, max(1.0, float(length)))
        self._sent_at_s = now_s
        return min(max(1.0, self._sent_away / rate), _RETRY_S_MAX)
