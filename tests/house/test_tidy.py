"""Lengths and bans, each ban with what to use instead."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"
FILES = sorted((SRC / "headrace").rglob("*.py"))
FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70

#: (dotted call, files that may, what to use instead)
BANNED_CALLS: list[tuple[str, str, str]] = [
    ("time.time", "clock.py", "clock.now_ms()"),
    ("time.time_ns", "clock.py", "clock.now_ms()"),
    ("time.monotonic", "clock.py", "clock.monotonic_s()"),
    ("time.sleep", "clock.py", "an Event or Condition with a timeout"),
    ("datetime.now", "clock.py", "clock.now_ms()"),
    ("datetime.utcnow", "clock.py", "clock.now_ms()"),
    ("random.random", "", "a random.Random handed in"),
    ("random.choice", "", "a random.Random handed in"),
    ("random.uniform", "", "a random.Random handed in"),
    ("random.randint", "", "a random.Random handed in"),
    ("print", "cli", "a log line, or cli"),
    ("eval", "", "a parser"),
    ("exec", "", "a parser"),
    ("pickle.loads", "", "msgspec"),
    ("pickle.load", "", "msgspec"),
    ("os.setsid", "", "nothing: a service stays in the session of `up`"),
    ("os.setpgid", "", "nothing: a service stays in the process group of `up`"),
]

ROOMS_THAT_SAY_NOTHING = {"utils", "util", "core", "common", "manager", "helpers", "misc", "types"}


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_a_file_is_short_and_so_are_its_functions(path: Path) -> None:
    text = path.read_text()
    lines = text.count("\n")
    assert lines <= FILE_LINES_MAX, f"{path}: {lines} lines; split it where a reader would look"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= FUNCTION_LINES_MAX, f"{path}:{node.lineno}: {node.name} has {length} lines"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_banned_calls_name_their_replacement(path: Path) -> None:
    where = str(path.relative_to(SRC / "headrace"))
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        for banned, allowed, instead in BANNED_CALLS:
            if name == banned or (("." in banned) and name.endswith("." + banned)):
                assert allowed and where.startswith(allowed), f"{path}:{node.lineno}: {name}; use {instead}"
        if name == "asyncio.sleep" and where != "clock.py":
            zero = bool(node.args) and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0
            assert zero, f"{path}:{node.lineno}: asyncio.sleep; use clock.sleep()"


def test_no_leftovers() -> None:
    mark = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
    tests = sorted((ROOT / "tests").rglob("*.py"))
    for path in [*FILES, *tests]:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert not mark.search(line), f"{path}:{number}: finish it or say it on an issue"


def test_no_room_has_a_name_that_says_nothing() -> None:
    for path in (SRC / "headrace").rglob("*"):
        assert path.stem not in ROOMS_THAT_SAY_NOTHING, f"{path}: name it for what it holds"


def test_every_file_is_imported_or_started_by_something() -> None:
    everything = "\n".join(
        path.read_text()
        for folder in ("src", "tests", "benchmarks", "examples")
        for path in (ROOT / folder).rglob("*.py")
    )
    text = everything + (ROOT / "pyproject.toml").read_text() + (ROOT / "Makefile").read_text()
    for path in FILES:
        if path.stem in {"__init__", "__main__"}:
            continue
        dotted_name = ".".join(path.relative_to(SRC).with_suffix("").parts)
        parent, _, leaf = dotted_name.rpartition(".")
        used = dotted_name in text or re.search(rf"from {re.escape(parent)} import [^\n]*\b{leaf}\b", text)
        assert used, f"{path}: nothing refers to it"
