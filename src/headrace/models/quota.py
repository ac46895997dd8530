"""How many CPUs are really ours: what the container grants, not what the host has (A19)."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["cpu_quota", "threads_for"]


def cpu_quota(root: Path = Path("/")) -> float:
    """Return the CPUs this process may use: the least of its affinity (a cpuset shows there) and its cgroups' quotas.

    A quota counts wherever on the way up it is set, in version 2 (`cpu.max`) as in version 1 (`cpu.cfs_quota_us`).
    """
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return min([float(len(affinity)), *_quotas(root)])


def threads_for(quota: float, workers: int, models: int) -> int:
    """Return the threads of one model so that those of all models in all processes together are about the quota."""
    return max(1, math.floor(quota / (max(1, workers) * max(1, models))))


def _quotas(root: Path) -> Iterator[float]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mount = root / "sys/fs/cgroup"
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            for folder in _upwards(mount, path):
                yield from _version_2(folder)
        elif "cpu" in controllers.split(","):
            base = next((mount / name for name in (controllers, "cpu") if (mount / name).is_dir()), None)
            if base is not None:
                for folder in _upwards(base, path):
                    yield from _version_1(folder)


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    # In a container the path may be the host's, of which only the mount's own root is visible.
    folder = mount / path.strip("/")
    while folder != mount:
        yield folder
        folder = folder.parent
    yield mount


def _version_2(folder: Path) -> Iterator[float]:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        yield int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return  # no such file, or "max"


def _version_1(folder: Path) -> Iterator[float]:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return
    if quota > 0 and period > 0:
        yield quota / period
