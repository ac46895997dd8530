"""Other processes on one file, and a disk that is soon full."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CHILDREN = Path(__file__).with_name("children.py")
Start = Callable[..., "subprocess.Popen[str]"]


def heard(child: subprocess.Popen[str]) -> dict[str, Any]:
    """Return the next fact that a child states."""
    assert child.stdout is not None
    line = child.stdout.readline()
    assert line, f"a child ended with {child.wait()}"
    return dict(json.loads(line))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return what starts another process on the file; none of them outlives the test."""
    children: list[subprocess.Popen[str]] = []

    def start_one(role: str, path: Path, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, str(CHILDREN), role, str(path), *map(str, arguments)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        children.append(child)
        return child

    yield start_one
    for child in children:
        child.kill()
        child.communicate()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a folder on a disk of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if shutil.which("mount") is None:
        pytest.skip("there is no mount here")
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "headrace-test", str(folder)], capture_output=True)
    if made.returncode != 0:
        pytest.skip(f"a small disk cannot be made here: {made.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
