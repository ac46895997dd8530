"""A19: threads are sized by what the container grants."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.models.quota import cpu_quota, threads_for

OURS = float(len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else float(os.cpu_count() or 1)


def machine(root: Path, cgroup: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    return root


def put(root: Path, name: str, content: str) -> None:
    path = root / "sys/fs/cgroup" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def test_a19_a_quota_of_version_2_counts(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/\n")
    put(root, "cpu.max", "50000 100000\n")
    assert cpu_quota(root) == 0.5


def test_a19_the_least_quota_on_the_way_up_counts(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/pods/one/container\n")
    put(root, "pods/cpu.max", "max 100000\n")
    put(root, "pods/one/cpu.max", "25000 100000\n")
    put(root, "pods/one/container/cpu.max", "80000 100000\n")
    assert cpu_quota(root) == 0.25


def test_a19_a_quota_of_version_1_counts_also_where_the_hosts_path_is_not_visible(tmp_path: Path) -> None:
    root = machine(tmp_path, "5:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n")
    put(root, "cpu,cpuacct/cpu.cfs_quota_us", "75000\n")
    put(root, "cpu,cpuacct/cpu.cfs_period_us", "100000\n")
    assert cpu_quota(root) == 0.75


@pytest.mark.parametrize("content", ["max 100000\n", "", "rubbish", "1 0\n"])
def test_without_a_quota_the_affinity_counts(content: str, tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/\n1:cpu:/\n")
    put(root, "cpu.max", content)
    put(root, "cpu/cpu.cfs_quota_us", "-1\n")
    put(root, "cpu/cpu.cfs_period_us", "100000\n")
    assert cpu_quota(root) == OURS


def test_without_any_cgroup_the_affinity_counts(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) == OURS


@pytest.mark.skipif(OURS < 2 or not hasattr(os, "sched_setaffinity"), reason="needs two CPUs to take one away")
def test_a19_a_cpuset_counts() -> None:
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from headrace.models.quota import cpu_quota; assert cpu_quota() <= 1, cpu_quota()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("quota", "workers", "models", "threads"),
    [(2, 1, 1, 2), (16, 4, 3, 1), (16, 4, 1, 4), (2.5, 1, 1, 2), (0.5, 4, 3, 1), (8, 1, 3, 2), (8, 0, 0, 8)],
)
def test_a19_all_models_in_all_processes_together_take_about_the_quota(
    quota: float, workers: int, models: int, threads: int
) -> None:
    assert threads_for(quota, workers, models) == threads
