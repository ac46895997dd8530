"""How much there is, how much is held, and who goes first."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from headrace.models.eviction import in_the_way, victim
from headrace.models.memory import budget_of, give_back, held_by, is_tight, memory_limit, resident_bytes

MIB = 1 << 20


def container(root: Path, limit: str, used: int = 0, cache: int = 0, *, path: str = "/pod/app") -> Path:
    """Lay out version 2's files, with the limit on the level above."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(f"0::{path}\n")
    folder = root / "sys/fs/cgroup/pod"
    (folder / "app").mkdir(parents=True)
    (folder / "app/memory.max").write_text("max\n")
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cache}\n")
    return root


def test_the_limit_is_the_containers_wherever_it_is_set(tmp_path: Path) -> None:
    root = container(tmp_path, str(512 * MIB))
    assert memory_limit(root) == 512 * MIB
    assert budget_of(0, root) == int(0.8 * 512 * MIB)
    assert budget_of(0, root, processes=4) == int(0.2 * 512 * MIB)
    assert budget_of(7, root, processes=4) == 7


def test_version_1_counts_too_and_its_number_for_none_does_not(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:cpu,cpuacct:/a\n3:memory:/a\n")
    folder = tmp_path / "sys/fs/cgroup/memory"
    (folder / "a").mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (folder / "a/memory.limit_in_bytes").write_text(f"{64 * MIB}\n")
    assert memory_limit(tmp_path) == 64 * MIB


@pytest.mark.parametrize("limit", ["max", "nonsense"])
def test_without_a_container_it_is_the_machine(tmp_path: Path, limit: str) -> None:
    assert memory_limit(container(tmp_path, limit)) == psutil.virtual_memory().total
    assert memory_limit(tmp_path / "nowhere") == psutil.virtual_memory().total
    assert not is_tight(tmp_path)


@pytest.mark.parametrize(("used", "cache", "tight"), [(90, 0, False), (99, 0, True), (99, 20, False)])
def test_a_container_is_tight_when_it_is_full_of_what_cannot_be_dropped(
    tmp_path: Path, used: int, cache: int, tight: bool
) -> None:
    assert is_tight(container(tmp_path, str(100 * MIB), used * MIB, cache * MIB)) is tight


def test_what_is_held_is_measured_and_the_dead_hold_nothing() -> None:
    before = held_by([os.getpid()])
    kept = np.ones(64 * MIB, np.uint8)
    assert held_by([os.getpid()]) - before > 50 * MIB
    assert resident_bytes() >= kept.nbytes
    assert held_by([2**22 + 1]) == 0


def test_what_was_freed_in_small_pieces_goes_back_to_the_system() -> None:
    pieces = [bytes(1000) for _ in range(150_000)]
    keep = pieces[::1000]
    high = resident_bytes()
    pieces.clear()
    give_back()
    assert high - resident_bytes() > 80 * MIB
    assert len(keep) == 150


def version(name: str, *, used_s: float, busy: bool = False, state: str = "ready", **others: Any) -> Any:
    return SimpleNamespace(
        name=name,
        state=state,
        used_s=used_s,
        busy=busy,
        pinned=others.get("pinned", False),
        loaded_s=others.get("loaded_s", 0.0),
        memory_bytes=others.get("memory_bytes", 0),
        batcher=object(),
    )


def test_the_least_recently_used_goes_first_the_busy_ones_last_and_the_pinned_never() -> None:
    versions = [
        version("pinned", used_s=1, pinned=True),
        version("evicted", used_s=2, state="evicted"),
        version("busy, loaded last", used_s=3, busy=True, loaded_s=9),
        version("busy, loaded first", used_s=90, busy=True, loaded_s=5),
        version("recent", used_s=80),
        version("old", used_s=50),
    ]
    order = []
    while (found := victim(versions, 100, idle_s=None)) is not None:
        order.append(found.name)  # type: ignore[attr-defined]
        versions.remove(found)
    assert order == ["old", "recent", "busy, loaded first", "busy, loaded last"]


def test_by_the_clock_only_the_idle_ones_go() -> None:
    versions = [version("busy", used_s=0, busy=True), version("recent", used_s=50), version("old", used_s=40)]
    found = victim(versions, 100, idle_s=60)
    assert found is not None and found.name == "old"  # type: ignore[attr-defined]
    assert victim(versions, 99, idle_s=60) is None


def test_what_is_in_the_way_is_counted_in_bytes() -> None:
    versions = [version("a", used_s=0, memory_bytes=40), version("b", used_s=0, memory_bytes=50)]
    assert in_the_way(versions, 20, 100) == 10
    assert in_the_way(versions, 10, 100) == 0
