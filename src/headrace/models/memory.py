"""How much memory the models may take, and how much there is and is held.

The budget is a share of what the container grants (or, without one, the machine has). What a version takes is
measured: how much this process grew while it was loaded and warmed, or what its runners' processes hold. The C library
keeps what was freed for later; it is told to give it back, or nothing would ever come of an eviction.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil

__all__ = ["budget_of", "give_back", "held_by", "is_tight", "memory_limit", "resident_bytes"]

#: The share of all memory that models may take; the rest is for requests, for answers and for this program.
SHARE = 0.8
#: A container that is this full is about to kill somebody.
_TIGHT = 0.95


def budget_of(bytes_max: int, root: Path = Path("/"), *, processes: int = 1) -> int:
    """Return the bytes that all models of one of so many processes may take; `bytes_max` if that is set."""
    return bytes_max or int(SHARE * memory_limit(root) / max(1, processes))


def memory_limit(root: Path = Path("/")) -> int:
    """Return the bytes there are: the least of what the machine has and what the cgroups on the way up allow."""
    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _groups(root))])


def is_tight(root: Path = Path("/")) -> bool:
    """Return whether a container's memory is nearly used up, whoever in it used it; caches of files do not count."""
    return any(used > _TIGHT * limit for limit, used in _groups(root))


def resident_bytes() -> int:
    """Return the memory of this process."""
    return int(psutil.Process().memory_info().rss)


def held_by(pids: Iterable[int]) -> int:
    """Return the memory of processes, what they share counted once; those that have gone count nothing."""
    total = 0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            full = psutil.Process(pid).memory_full_info()
            total += int(getattr(full, "pss", 0) or full.rss)
    return total


def give_back(*, collect: bool = True) -> None:
    """Return freed memory to the system, where the C library can be told to (glibc). Takes some milliseconds.

    `collect` finds first what only refers to itself; that stops every thread meanwhile.
    """
    if collect:
        gc.collect()
    if _trim is not None:
        _trim(0)


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, used) of every cgroup on the way up that has a limit, version 2 and version 1."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # In a container the path may be the host's, of which only the mount's own root is visible.
        folder = mount / path.strip("/")
        for each in [folder, *(parent for parent in folder.parents if parent.is_relative_to(mount))]:
            found = _limit_and_use(each, *names)
            if found is not None:
                yield found


def _limit_and_use(folder: Path, limit_name: str, used_name: str, cache_name: str) -> tuple[int, int] | None:
    try:
        limit = int((folder / limit_name).read_text())
    except (OSError, ValueError):
        return None  # no such file, or "max"
    used = 0
    with contextlib.suppress(OSError, ValueError):
        used = int((folder / used_name).read_text())
        for line in (folder / "memory.stat").read_text().splitlines():
            if line.startswith(f"{cache_name} "):
                used -= int(line.split()[1])
    # Version 1 says "none" with a number that no machine has.
    return (limit, used) if 0 < limit < 1 << 60 else None


def _find_trim() -> Callable[[int], int] | None:
    if sys.platform != "linux":
        return None
    try:
        found = ctypes.CDLL("libc.so.6").malloc_trim
    except (OSError, AttributeError):
        return None  # another C library
    found.argtypes, found.restype = [ctypes.c_size_t], ctypes.c_int
    return found


_trim = _find_trim()
