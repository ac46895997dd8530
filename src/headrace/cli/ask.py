"""The commands that ask a model: here, or of a server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from headrace.assembly import CannotStart, run_service
from headrace.cli.client import Client
from headrace.cli.options import Config, Json, ModelPath, Url, settings_of
from headrace.cli.show import note, show_json

__all__ = ["predict", "result", "submit"]

_POLL_S = 30

Input = Annotated[
    str,
    typer.Option(
        "-i",
        "--input",
        metavar="FILE",
        help='The request: Open Inference Protocol JSON, {"data": …}, or an array in .npy; - reads stdin.',
    ),
]


def predict(
    model: Annotated[str, typer.Argument(help="PATH, NAME=PATH or python:package.module:callable.")],
    input: Input,
    model_path: ModelPath = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Run a model once, in this process, and print its answer."""
    from headrace.assembly.local import Local

    settings = settings_of(config, model_path=model_path)
    local = Local(_content(input))
    run_service("predict", local.main, settings, [model], quiet=True)
    show_json(local.answer, compact=as_json)


def submit(
    model: Annotated[str, typer.Argument(help="The name of a model that the server serves.")],
    input: Input,
    url: Url = None,
    key: Annotated[
        str | None, typer.Option("--key", help="Idempotency-Key: the same key and request give the same id.")
    ] = None,
    webhook: Annotated[str | None, typer.Option("--webhook", help="Where the result is to be sent.")] = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Send a request to a running server, to be answered later; print its id and where to look."""
    from headrace.assembly.local import NPY_MAGIC, is_plain, request_of
    from headrace.tensor import Signature, encode_request

    client = Client(url, settings_of(config))
    body, name = _content(input), client.part(model)
    headers = {"Prefer": "respond-async", "Content-Type": "application/json"}
    if key is not None:
        headers["Idempotency-Key"] = key
    if webhook is not None:
        headers["Webhook-URL"] = webhook
    path = f"/predict/{name}" if is_plain(body) else f"/v2/models/{name}/infer"
    if body.startswith(NPY_MAGIC):
        metadata = client.call(f"/v2/models/{name}")
        metadata.raise_for_error()
        signature = Signature.from_json({part: metadata.body[part] for part in ("inputs", "outputs")})
        body, length = encode_request(request_of(body, model, signature))
        headers |= {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(length)}
    answer = client.call(path, body, headers)
    location = answer.headers.get("location")
    if location is None:
        answer.raise_for_error()
        raise CannotStart(f"{client.url} answers at once and takes nothing for later; is it `headrace serve`?")
    found = {"id": location.rpartition("/")[2], "location": client.url + location, "model": model}
    if as_json:
        show_json(found, compact=True)
    else:
        typer.echo(f"{found['id']}\n{found['location']}")


def result(
    id: Annotated[str, typer.Argument(help="What `submit` printed, or the last part of a Location.")],
    wait: Annotated[bool, typer.Option("--wait", help="Wait until there is a result.")] = False,
    url: Url = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Print what became of a request. Exit 1 if it failed or is not known."""
    client = Client(url, settings_of(config))
    while True:
        query = f"?wait={_POLL_S}" if wait else ""
        answer = client.call(f"/requests/{client.part(id)}{query}", timeout_s=_POLL_S if wait else 30)
        answer.raise_for_error()
        if answer.status == 200 or not wait:
            break
    show_json(answer.body, compact=as_json)
    if answer.status != 200:
        note("headrace: there is no result yet; --wait waits for it")
    raise typer.Exit(1 if answer.body.get("status") == "failed" else 0)


def _content(file: str) -> bytes:
    return sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
