"""An outage of the broker or the store: said once when it begins and once when it is over; tries are spaced out."""

from __future__ import annotations

from typing import Literal

from headrace.clock import Clock
from headrace.errors import HeadraceError, StorageFull
from headrace.telemetry.logs import Logs

__all__ = ["Outage"]

_PAUSE_S_FIRST = 0.05
_PAUSE_S_MAX = 2.0


class Outage:
    """Whether something we depend on is away, and how long to wait before the next try."""

    def __init__(self, what: Literal["broker", "store"], clock: Clock, logs: Logs) -> None:
        """Begin with all well."""
        self._what = what
        self._clock = clock
        self._logs = logs
        self._pause_s = _PAUSE_S_FIRST
        #: The latest failure; None while all is well.
        self.error: HeadraceError | None = None

    @property
    def lasts(self) -> bool:
        """Return whether the last try failed."""
        return self.error is not None

    def begin(self, error: HeadraceError) -> None:
        """Note a failure."""
        if self.error is None:
            self._logs.say(
                "storage_full" if isinstance(error, StorageFull) else f"{self._what}_unavailable", error=error
            )
        self.error = error

    async def failed(self, error: HeadraceError) -> None:
        """Note a failure and return when it is time to try again."""
        self.begin(error)
        pause_s, self._pause_s = self._pause_s, min(_PAUSE_S_MAX, 2 * self._pause_s)
        await self._clock.sleep(pause_s)

    def over(self) -> None:
        """Note a success."""
        if self.error is not None:
            self.error = None
            self._pause_s = _PAUSE_S_FIRST
            self._logs.say("recovered", what=self._what)
