"""Which version goes when memory is short. Pure: what is hosted and what time it is are handed in."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.errors import ModelLoadFailed
from headrace.models.hosted import Hosted
from headrace.runtimes import Artifact

__all__ = ["in_the_way", "no_room", "victim"]


def victim(versions: Iterable[Hosted], now_s: float, *, idle_s: float | None) -> Hosted | None:
    """Return the least recently used version that may be evicted; None if there is none.

    With `idle_s` only those that were idle for so long; without, the idle ones first, and then the busy ones, those
    loaded longest ago first, so that each has its turn.
    """
    able = [each for each in versions if each.state == "ready" and not each.pinned and each.batcher is not None]
    if idle_s is not None:
        able = [each for each in able if not each.busy and now_s - each.used_s >= idle_s]
    return min(able, key=lambda each: (each.busy, each.loaded_s if each.busy else each.used_s), default=None)


def in_the_way(versions: Iterable[Hosted], wanted: int, budget: int) -> int:
    """Return by how many bytes what is resident and `wanted` more are over the budget; 0 or less: they fit."""
    return sum(each.memory_bytes for each in versions) + wanted - budget


def no_room(artifact: Artifact, wanted: int, versions: Iterable[Hosted], budget: int) -> ModelLoadFailed:
    """Return the error that says how much was wanted and how much there was."""
    left = -in_the_way(versions, 0, budget)
    reason = f"it needs {wanted} bytes, and of {budget} there are {max(0, left)} left"
    return ModelLoadFailed(
        f"model {artifact.name!r} cannot be loaded: {artifact.shown}: {reason}",
        details={"file": artifact.shown, "reason": reason, "expected": []},
    )
