"""Dead letters: what was given up on, why, and how to try it again."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from headrace.assembly import CannotStart
from headrace.assembly.letters import Letters, open_letters
from headrace.cli.options import Broker, Config, Data, Json, Store, settings_of
from headrace.cli.show import show_json, show_table
from headrace.errors import HeadraceError
from headrace.settings import Settings
from headrace.stores import DeadLetter
from headrace.tensor import decode_request, tensor_to_json

__all__ = ["app", "list_letters", "replay", "show"]

app = typer.Typer(
    help="Messages and deliveries that were given up on. Works while `up` runs.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Id = Annotated[str, typer.Argument(help="The message's id.")]
Destination = Annotated[
    str | None,
    typer.Option("--destination", help="The delivery to this URL; without it, the message (or its only delivery)."),
]


@app.command(name="list")
def list_letters(
    limit: Annotated[int, typer.Option("--limit", help="At most so many.", min=1, max=10_000)] = 100,
    after: Annotated[str, typer.Option("--after", help="Go on after this cursor (`next` of --json).")] = "",
    data: Data = None,
    broker: Broker = None,
    store: Store = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """List dead letters of both kinds, oldest first."""
    settings = settings_of(config, data=data, broker=broker, store=store)
    letters, following = _with(settings, lambda opened: opened.list(after, limit))
    if as_json:
        show_json({"dead": [_row(letter) for letter in letters], "next": following}, compact=True)
    elif not letters:
        typer.echo("There are no dead letters.")
    else:
        headings = ("kind", "id", "model", "code", "attempts", "since", "replayed as", "destination")
        show_table(
            headings,
            *(
                (
                    letter.kind,
                    letter.id,
                    letter.model,
                    letter.reason_code,
                    str(letter.attempts),
                    _time(letter.dead_at_ms),
                    letter.replayed_as or "-",
                    letter.destination or "-",
                )
                for letter in letters
            ),
        )


@app.command()
def show(
    id: Id,
    destination: Destination = None,
    data: Data = None,
    broker: Broker = None,
    store: Store = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Show one dead letter with its reason and, for a message, its inputs."""
    settings = settings_of(config, data=data, broker=broker, store=store)
    letter = _with(settings, lambda opened: opened.find(id, destination))
    show_json(_row(letter) | {"inputs": _inputs(letter)}, compact=as_json)


@app.command()
def replay(
    id: Id,
    destination: Destination = None,
    data: Data = None,
    broker: Broker = None,
    store: Store = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Try again: a message becomes a new one with `replay_of`; a delivery keeps its `webhook-id`."""
    settings = settings_of(config, data=data, broker=broker, store=store)
    replayed_as = _with(settings, lambda opened: opened.replay(id, destination))
    if as_json:
        show_json({"id": id, "replayed_as": replayed_as}, compact=True)
    else:
        typer.echo(replayed_as or f"{id}: the delivery is due again")


def _with(settings: Settings, work: Callable[[Letters], Awaitable[Any]]) -> Any:
    return open_letters(settings, work)


def _row(letter: DeadLetter) -> dict[str, Any]:
    return {
        "kind": letter.kind,
        "id": letter.id,
        "model": letter.model,
        "code": letter.reason_code,
        "reason": letter.reason,
        "attempts": letter.attempts,
        "dead_at": _time(letter.dead_at_ms),
        "destination": letter.destination,
        "replayed_as": letter.replayed_as,
    }


def _inputs(letter: DeadLetter) -> list[dict[str, Any]] | None:
    message = letter.message
    if message is None:
        return None
    with contextlib.suppress(HeadraceError):
        request = decode_request(message.payload, message.header_length, model=message.model)
        return [
            {
                "name": name,
                "datatype": tensor.datatype.name,
                "shape": list(tensor.shape),
                "data": tensor_to_json(tensor, flat=True, name=name, kind="input"),
            }
            for name, tensor in request.inputs.items()
        ]
    raise CannotStart(f"{letter.id}: its payload of {len(message.payload)} bytes cannot be read")


def _time(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
