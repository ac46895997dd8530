"""Write the pages that are made from the code: settings, errors, metrics and commands. `make docs` runs it.

`tests/house/test_docs.py` fails while a page on disk differs from what this would write.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from headrace import errors, settings
from headrace.assembly import SECTIONS
from headrace.cli import app
from headrace.services.statuses import GRPC, HTTP
from headrace.telemetry.names import LINES, METRICS, SPANS

HERE = Path(__file__).parent
MADE = "<!-- Made by `make docs` from the code; edit the code. -->"


def page(title: str, *parts: str) -> str:
    """Return a page with its title and the note that it is generated."""
    return "\n\n".join([f"# {title}", MADE, *parts]) + "\n"


def table(headings: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def settings_page() -> str:
    """Return every setting, section by section, as it is declared beside the code that uses it."""
    by_section: dict[str, list[list[str]]] = {}
    for row in settings.describe(SECTIONS):
        section = row.key.rpartition(".")[0]
        default = "(secret)" if row.secret and row.default else row.default
        cells = [f"`{row.key}`", f"`{row.environ}`", row.type, f"`{default}`" if default else "", row.allowed, row.doc]
        by_section.setdefault(section, []).append(cells)
    intro = (
        "Flag > environment > file > default. The file is `headrace.toml` in the working directory, or what `--config` "
        "names; `ingest.wait_s` is `wait_s` under `[ingest]` there. `headrace check` lists every fault at once."
    )
    headings = ["Setting", "Environment", "Type", "Default", "Allowed", "What it does"]
    parts = [f"## {section or 'General'}\n\n{table(headings, rows)}" for section, rows in by_section.items()]
    return page("Settings", intro, *parts)


def errors_page() -> str:
    """Return the closed table of errors."""
    rows = []
    for code, http in HTTP.items():
        kind = errors.BY_CODE[code]
        meaning = (inspect.getdoc(kind) or "").splitlines()[0]
        retry = "yes" if kind.retryable else "no"
        whose = {"caller": "the caller", "nobody": "nobody"}.get(kind.fault, "us")
        rows.append([f"`{code}`", str(http), GRPC[code], whose, retry, meaning])
    intro = (
        "Every error, on every route, in results and in webhooks, has one shape; `error` is always a string:\n\n"
        '```json\n{"error": "Shape mismatch", "code": "shape_mismatch", '
        '"details": {"input": "x", "expected": [-1, 128], "actual": [1, 127]}, '
        '"request_id": "…", "status": 400}\n```\n\n'
        "The list is closed. Only errors whose fault is ours count against `/health` and make dead letters. "
        "`429` and `503` carry a `Retry-After` where there is an estimate to give."
    )
    return page("Errors", intro, table(["Code", "HTTP", "gRPC", "Whose fault", "Retry as it is?", "Means"], rows))


def metrics_page() -> str:
    """Return every metric, log line and span."""
    metrics = [[f"`{row.name}`", row.kind, ", ".join(f"`{label}`" for label in row.labels), row.doc] for row in METRICS]
    lines = [[f"`{row.name}`", row.level, ", ".join(f"`{field}`" for field in row.fields), row.doc] for row in LINES]
    spans = [[f"`{span.name}`", span.doc] if hasattr(span, "doc") else [f"`{span}`", ""] for span in SPANS]
    return page(
        "Metrics, log lines and spans",
        "`GET /metrics` on ingest shows all services of a stack: "
        "those of the other processes carry the label `instance`.",
        "## Metrics\n\n" + table(["Name", "Kind", "Labels", "Means"], metrics),
        "## Log lines\n\nOne JSON object a line, on stderr.\n\n" + table(["Event", "Level", "Fields", "Means"], lines),
        "## Spans\n\n" + table(["Name", "Means"], spans),
    )


def commands_page() -> str:
    """Return every command with its arguments and options."""
    root = typer.main.get_command(app)
    return page("Commands", *(section for section in _commands(root, ("headrace",))))


def _commands(command: Any, path: tuple[str, ...]) -> Iterator[str]:
    children = getattr(command, "commands", None)
    if children:
        for name in children:
            yield from _commands(children[name], (*path, name))
        return
    rows = []
    for parameter in command.params:
        is_argument = parameter.param_type_name == "argument"
        name = f"`{parameter.name.upper()}`" if is_argument else ", ".join(f"`{option}`" for option in parameter.opts)
        rows.append([name, " ".join((getattr(parameter, "help", None) or "").split())])
    text = inspect.cleandoc(command.help or "").replace("\b\n", "")
    parts = [f"## {' '.join(path)}", text, table(["Argument", "What it does"], rows) if rows else ""]
    yield "\n\n".join(part for part in parts if part)


PAGES = {
    "settings.md": settings_page,
    "errors.md": errors_page,
    "metrics.md": metrics_page,
    "commands.md": commands_page,
}


def main() -> None:
    """Write the pages."""
    for name, made in PAGES.items():
        (HERE / name).write_text(made())


if __name__ == "__main__":
    main()
