"""What is printed, and where: results to stdout, everything else to stderr."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import typer

__all__ = ["fail", "note", "show_json", "show_table"]


def show_json(value: object, *, compact: bool = False) -> None:
    """Print an object: for people on several lines, for programs on one."""
    typer.echo(json.dumps(value, ensure_ascii=False, indent=None if compact else 2))


def note(text: str) -> None:
    """Say something that is no result."""
    typer.echo(text, err=True)


def show_table(*rows: Sequence[str]) -> None:
    """Print rows in columns."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def fail(code: str, text: str, as_json: bool, details: Mapping[str, Any] | None = None) -> int:
    """Say why a command failed; return its exit code."""
    if as_json:
        found: dict[str, Any] = {"error": text, "code": code or "failed"}
        if details:
            found["details"] = dict(details)
        show_json(found, compact=True)
    else:
        more = f" {json.dumps(dict(details), ensure_ascii=False)}" if details else ""
        for line in (text + more).splitlines():
            note(f"headrace: {line}")
    return 1
