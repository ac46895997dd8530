"""`headrace check`."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from headrace.assembly.checks import check_all
from headrace.cli.options import Broker, Config, Data, Json, ModelPath, Store
from headrace.cli.show import show_json, show_table

__all__ = ["check"]


def check(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL]…", help="Models to load once, each in a child process.")
    ] = None,
    model_path: ModelPath = None,
    data: Data = None,
    broker: Broker = None,
    store: Store = None,
    show_secret: Annotated[
        bool, typer.Option("--show-secret", help="Print the secret that webhooks are signed with.")
    ] = False,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Look at settings, models, connections and disk; tell all faults at once. Starts nothing; exit 1 on any fault."""
    given = {"model_path": model_path, "data": data, "broker": broker, "store": store}
    flags = {name: value for name, value in given.items() if value is not None}
    findings = check_all(flags, os.environ, config, models or (), show_secret=show_secret)
    good = all(finding.state != "fault" for finding in findings)
    if as_json:
        rows = [{"what": each.what, "state": each.state, "text": each.text} for each in findings]
        show_json({"ok": good, "findings": rows}, compact=True)
    else:
        show_table(*((each.state, each.what, each.text) for each in findings))
    raise typer.Exit(0 if good else 1)
