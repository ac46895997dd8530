"""Places where a test may have this process killed: between two durable steps, where it hurts most.

`HEADRACE_CRASH_AT=committed:3` sends SIGKILL to the process at the third message that passes `committed`. A service
asks once, when it is made, for the points it passes; unset, a point is a function that does nothing.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping

__all__ = ["POINTS", "VARIABLE", "crash_point"]

VARIABLE = "HEADRACE_CRASH_AT"

#: Every point, in the order in which one message passes them.
POINTS = ("published", "claimed", "computed", "committed", "acked", "sent")


def crash_point(name: str, environ: Mapping[str, str] | None = None) -> Callable[[int], None]:
    """Return what a service calls each time `count` messages pass the point `name`.

    Raises ValueError for a variable that names no point or no positive number.
    """
    value = (os.environ if environ is None else environ).get(VARIABLE, "")
    if not value:
        return _pass
    wanted, _, number = value.partition(":")
    if wanted not in POINTS or name not in POINTS or not (number or "1").isdigit() or int(number or "1") < 1:
        raise ValueError(f"{VARIABLE} is POINT or POINT:NUMBER, and a point is one of {', '.join(POINTS)}")
    return _Point(int(number or "1")).pass_by if wanted == name else _pass


def _pass(count: int) -> None:
    """Do nothing: no crash is wanted here."""


class _Point:
    def __init__(self, left: int) -> None:
        self._left = left

    def pass_by(self, count: int) -> None:
        self._left -= count
        if self._left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
