"""The documentation is complete and true today."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from headrace import errors, settings
from headrace.assembly import SECTIONS
from headrace.services.statuses import GRPC, HTTP
from headrace.telemetry.names import LINES, METRICS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), *ROOT.glob("*.md")])


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["settings.md", "errors.md", "metrics.md", "commands.md"])
def test_a_generated_page_is_what_the_code_says(name: str) -> None:
    assert (DOCS / name).read_text() == generator().PAGES[name](), "run `make docs`"


def test_every_setting_metric_log_line_and_error_has_its_row() -> None:
    text = "\n".join((DOCS / name).read_text() for name in ("settings.md", "errors.md", "metrics.md"))
    names = [row.environ for row in settings.describe(SECTIONS)] + [row.name for row in (*METRICS, *LINES)]
    missing = [name for name in [*names, *errors.BY_CODE] if f"`{name}`" not in text]
    assert missing == []


def test_the_table_of_errors_is_closed() -> None:
    assert set(HTTP) == set(errors.BY_CODE) == set(GRPC)


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_link_to_a_file_leads_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text()):
        assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_every_file_named_in_the_docs_exists() -> None:
    for path in PAGES:
        for name in re.findall(r"`((?:src|tests|benchmarks|examples|docs)/[\w./-]+)`", path.read_text()):
            assert (ROOT / name).exists(), f"{path.name} names {name}"


def test_every_make_command_in_the_docs_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.M))
    for path in PAGES:
        for name in re.findall(r"(?:^|`)make ([a-z]+)", path.read_text(), re.M):
            assert name in targets, f"{path.name} says make {name}"


def test_every_headrace_command_in_the_docs_exists() -> None:
    commands = (DOCS / "commands.md").read_text()
    known = set(re.findall(r"^## headrace ([a-z ]+)$", commands, re.M))
    first = {name.split()[0] for name in known}
    for path in PAGES:
        for name in re.findall(r"(?:^|`|\$ )headrace ([a-z]+)", path.read_text(), re.M):
            assert name in first, f"{path.name} says headrace {name}"


def test_every_promise_names_a_test_that_exists() -> None:
    text = (DOCS / "guarantees.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) >= 11
    for file, test in named:
        assert f"def {test}" in (ROOT / file).read_text(), f"guarantees.md names {file}::{test}"
