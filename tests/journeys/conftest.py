"""A stack per test, and nothing left running after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from journeys.stack import Stack


@pytest.fixture
def new_stack(tmp_path: Path) -> Iterator[Callable[..., Stack]]:
    """Return a function that makes stacks in this test's folder."""
    made: list[Stack] = []

    def new(
        *models: str, folder: Path | None = None, command: str = "up", flags: tuple[str, ...] = (), **environ: str
    ) -> Stack:
        stack = Stack(folder or tmp_path, list(models), command=command, flags=flags, **environ)
        made.append(stack)
        return stack

    yield new
    for stack in made:
        stack.destroy()
