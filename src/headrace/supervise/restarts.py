"""When a child that died is started again. Pure: what happened is handed in."""

from __future__ import annotations

__all__ = ["DEATHS_MAX", "KILLS_MAX", "Restarts"]

#: Deaths in a row before a child was ready, after which it is given up.
DEATHS_MAX = 10

#: The same for deaths by a SIGKILL that was not ours. They say little about the child: a storm of `kill -9` from
#: outside ends one day, and so does a shortage of memory.
KILLS_MAX = 100

_PAUSE_S_FIRST = 0.1
_PAUSE_S_MAX = 5.0
_KILLED_PAUSE_S_MAX = 1.0


class Restarts:
    """The deaths of one slot that count: those before it was ready, since it last was."""

    def __init__(self) -> None:
        """Begin without any."""
        self.deaths = 0
        self.kills = 0

    def became_ready(self) -> None:
        """Note that it started well: what was before counts no more."""
        self.deaths = self.kills = 0

    def died(self, *, was_ready: bool, killed: bool) -> float | None:
        """Return after how many seconds to start again; None: give up.

        `killed` means by a SIGKILL from outside.
        """
        if was_ready:
            return 0.0
        if killed:
            self.kills += 1
        else:
            self.deaths += 1
        if self.deaths >= DEATHS_MAX or self.kills >= KILLS_MAX:
            return None
        pause_s = _PAUSE_S_FIRST * 2.0 ** (self.deaths + self.kills - 1)
        return min(pause_s, _KILLED_PAUSE_S_MAX if killed else _PAUSE_S_MAX)
