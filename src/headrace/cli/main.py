"""All commands under one roof, and what becomes of their errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from headrace import __version__
from headrace.assembly import CannotStart
from headrace.cli import ask, checks, dead, exports, services
from headrace.cli.show import fail
from headrace.errors import HeadraceError
from headrace.settings import SettingsError

__all__ = ["app", "main"]

app = typer.Typer(
    name="headrace",
    help="Serve machine-learning models over two roads: synchronous, and queued with exactly one result.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

app.command()(services.serve)
app.command()(services.up)
app.command()(services.ingest)
app.command()(services.inference)
app.command()(services.delivery)
app.command()(ask.predict)
app.command()(ask.submit)
app.command()(ask.result)
app.add_typer(dead.app, name="dead")
app.command()(checks.check)
app.add_typer(exports.app, name="export")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Serve machine-learning models over two roads: synchronous, and queued with exactly one result."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in words
    try:
        app(words)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1 if end.code else 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has had enough; what is left in the buffer has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except SettingsError as error:
        return fail("settings", "\n".join(str(fault) for fault in error.faults), as_json)
    except CannotStart as error:
        return fail("", str(error), as_json)
    except HeadraceError as error:
        return fail(error.code, error.message, as_json, error.details)
    except OSError as error:
        return fail("", f"{error.filename or 'the system'}: {error.strerror or error}", as_json)
    return 0
