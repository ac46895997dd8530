"""Imports run downwards only; nobody imports a sibling adapter; heavy clients stay in their one file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
PACKAGE = SRC / "headrace"

#: From the ground up; rooms on one floor do not import each other.
FLOORS: list[set[str]] = [
    {"errors"},
    {"tensor"},
    {"message"},
    {"settings", "clock"},
    {"sqlite", "supervise"},
    {"telemetry"},
    {"brokers", "stores", "runtimes", "sinks"},
    {"models"},
    {"services"},
    {"web"},
    {"assembly"},
    {"testing"},
    {"chaos", "advise", "bench", "export"},
    {"cli"},
    {"__main__"},
]
LEVEL = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}

#: Third-party modules that exactly one file (or room) may import.
ONE_HOME = {
    "apsw": "headrace/sqlite",
    "onnxruntime": "headrace/runtimes/onnx.py",
    "torch": "headrace/runtimes/torchscript",
    "tensorflow": "headrace/runtimes/tensorflow.py",
    "aiohttp": "headrace/sinks/webhook",
    "google": "headrace/web/grpc",
    "grpc": "headrace/web/grpc",
    "standardwebhooks": "headrace/sinks/webhook.py",
    "httptools": "headrace/web/connection.py",
    "prometheus_client": "headrace/telemetry/exposition.py",
    "typer": "headrace/cli",
    "rich": "headrace/cli",
}

FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    """Return the top-level room that a file stands in."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Yield every imported module with its line, also those inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the whole name"
            assert node.module is not None
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                is_module = (SRC / Path(*whole.split("."))).with_suffix(".py").exists()
                yield (whole if is_module else node.module), node.lineno


def test_every_room_has_a_floor() -> None:
    rooms = {room_of(path) for path in FILES} - {"__init__"}
    assert rooms <= set(LEVEL), f"give these a floor: {sorted(rooms - set(LEVEL))}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_imports_run_downwards_only(path: Path) -> None:
    room = room_of(path)
    if room == "__init__":
        return
    for name, line in imports(path):
        if not name.startswith("headrace."):
            continue
        other = name.split(".")[1]
        if other in {room, "__version__"}:
            continue
        assert LEVEL[other] < LEVEL[room], f"{path}:{line}: {room} may not import {other}"


@pytest.mark.parametrize("room", ["brokers", "stores", "runtimes", "sinks"])
def test_an_adapter_imports_no_sibling(room: str) -> None:
    for path in sorted((PACKAGE / room).glob("*.py")):
        if path.stem in {"__init__", "base"}:
            continue
        for name, line in imports(path):
            parts = name.split(".")
            if parts[:2] == ["headrace", room]:
                own = path.stem.split("_")[0]
                allowed = len(parts) > 2 and (parts[2] == "base" or parts[2].split("_")[0] == own)
                assert allowed, f"{path}:{line}: imports {name}"


def test_there_are_no_import_circles() -> None:
    edges = {module_of(path): {name for name, _ in imports(path) if name.startswith("headrace.")} for path in FILES}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name in done:
            return
        for other in sorted(edges.get(name, ())):
            visit(other, (*trail, name))
        done.add(name)

    for name in sorted(edges):
        visit(name, ())


def test_a_third_party_client_is_imported_in_its_one_file() -> None:
    for path in FILES:
        where = str(path.relative_to(SRC))
        for name, line in imports(path):
            home = ONE_HOME.get(name.split(".")[0])
            assert home is None or where.startswith(home), f"{path}:{line}: {name} belongs in {home}"
