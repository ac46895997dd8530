"""When a failed delivery is tried again. Pure: the time, the rule and the dice are handed in.

The default is the example of Standard Webhooks: 0 s, 5 s, 5 min, 30 min, 2 h, 5 h, 10 h, 14 h, 20 h, 24 h, together
75 hours and a half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from headrace.sinks.base import Outcome

__all__ = ["RETRY_AFTER_S_MAX", "STANDARD_S", "Schedule"]

STANDARD_S = (0.0, 5.0, 300.0, 1800.0, 7200.0, 18_000.0, 36_000.0, 50_400.0, 72_000.0, 86_400.0)

#: A receiver may ask for a pause, but not for a longer one: what it asks for is not ours to trust.
RETRY_AFTER_S_MAX = 3600.0


@dataclass(frozen=True, slots=True)
class Schedule:
    """The delays before each attempt, counted from the end of the one before."""

    steps_s: Sequence[float] = STANDARD_S
    #: Each delay is spread by this share, up and down, so that what failed together does not come back together.
    jitter: float = 0.2
    #: The least delay after an answer, or a silence, that says the receiver has too much to do.
    throttle_s: float = 30.0

    @property
    def attempts_max(self) -> int:
        """Return how many attempts there are."""
        return len(self.steps_s)

    @property
    def whole_s(self) -> float:
        """Return how long it takes from its beginning to its last attempt, if attempts take no time."""
        return sum(self.steps_s)

    def put_off_s(self, age_s: float, rng: Random) -> float | None:
        """Return the seconds until the next time of the schedule, for what began `age_s` ago and cannot be tried now;
        None: its last time has come. Spread upwards only."""
        at_s = 0.0
        for step_s in self.steps_s:
            at_s += step_s
            if at_s > age_s:
                return (at_s - age_s) * (1 + self.jitter * rng.random())
        return None

    def used_up(self, attempt: int) -> bool:
        """Return whether attempt number `attempt` (from 1) comes after the last one."""
        return attempt > len(self.steps_s)

    def next_s(self, attempt: int, outcome: Outcome, rng: Random) -> float | None:
        """Return the seconds from the end of attempt number `attempt` (from 1) to the next; None: it was the last.

        Retry-After, up to an hour, and without it the pause for an overloaded receiver, lengthen the delay and never
        shorten it; they are spread upwards only, since earlier than asked for is wrong.
        """
        if attempt >= len(self.steps_s):
            return None
        delay_s = self.steps_s[attempt] * (1 + self.jitter * (2 * rng.random() - 1))
        asked_s = outcome.retry_after_s
        if asked_s is None:
            asked_s = self.throttle_s if outcome.throttled else 0.0
        return max(delay_s, min(asked_s * (1 + self.jitter * rng.random()), RETRY_AFTER_S_MAX))
