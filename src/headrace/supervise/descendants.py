"""What a service leaves behind when it ends: processes that a model started and did not end."""

from __future__ import annotations

import psutil

__all__ = ["end_descendants"]


def end_descendants(grace_s: float = 1.0) -> int:
    """Ask every process below this one to end, kill those that do not within `grace_s`; return how many there were.

    A copy that a model forked would go on for ever, and hold our sockets.
    """
    left = psutil.Process().children(recursive=True)
    for signal in ("terminate", "kill"):
        for process in left:
            try:
                getattr(process, signal)()
            except psutil.NoSuchProcess:
                pass
        _, alive = psutil.wait_procs(left, timeout=grace_s)
        if not alive:
            break
    return len(left)
