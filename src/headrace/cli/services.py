"""The commands that run services."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.assembly import run_service
from headrace.assembly.child import service_main
from headrace.cli.options import (
    AdminPort,
    Broker,
    Config,
    Data,
    GrpcPort,
    Host,
    Json,
    LogLevel,
    ModelPath,
    Models,
    Port,
    Store,
    Strict,
    Workers,
    settings_of,
)
from headrace.cli.show import note, show_json

__all__ = ["delivery", "inference", "ingest", "serve", "up"]


def serve(
    models: Models,
    host: Host = None,
    port: Port = None,
    admin_port: AdminPort = None,
    grpc_port: GrpcPort = None,
    workers: Workers = None,
    model_path: ModelPath = None,
    strict: Strict = False,
    config: Config = None,
    log_level: LogLevel = None,
) -> None:
    """Serve models over the short road: requests are answered at once, by this process."""
    settings = settings_of(
        config,
        host=host,
        port=port,
        admin_port=admin_port,
        grpc_port=grpc_port,
        workers=workers,
        model_path=model_path,
        log_level=log_level,
    )

    def announce(url: str, grpc: str, reasons: Sequence[str]) -> None:
        for reason in reasons:
            note(f"headrace: not served: {reason}")
        word = "Serving, not ready," if reasons else "Ready"
        typer.echo(f"{word} at {_both(url, grpc)}   (try {url}/health  {url}/docs  {url}/metrics)")

    raise typer.Exit(run_service("serve", service_main("serve"), settings, models, strict=strict, announce=announce))


def up(
    models: Models,
    host: Host = None,
    port: Port = None,
    grpc_port: GrpcPort = None,
    workers: Workers = None,
    model_path: ModelPath = None,
    data: Data = None,
    broker: Broker = None,
    store: Store = None,
    strict: Strict = False,
    config: Config = None,
    log_level: LogLevel = None,
    as_json: Json = False,
) -> None:
    """Run the long road on this machine: ingest, inference processes and delivery, looked after."""
    settings = settings_of(
        config,
        host=host,
        port=port,
        grpc_port=grpc_port,
        workers=workers,
        model_path=model_path,
        data=data,
        broker=broker,
        store=store,
        log_level=log_level,
    )
    # Only here: the other commands do without what this imports.
    from headrace.assembly.preparation import Prepared
    from headrace.assembly.up import run_up

    def announce(url: str, grpc: str, prepared: Prepared, reasons: Sequence[str]) -> None:
        names = sorted({artifact.name for artifact in prepared.good})
        if as_json:
            also = {"grpc": grpc} if grpc else {}
            show_json({"url": url, **also, "models": names, "broken": prepared.broken}, compact=True)
            return
        for reason in prepared.broken.values():
            note(f"headrace: not served: {reason}")
        word = "Serving, not ready" if reasons else "Ready"
        typer.echo(f"{word}: {', '.join(names)} at {_both(url, grpc)}   (try {url}/health  {url}/docs  {url}/results)")

    code = run_up(
        settings,
        models,
        strict=strict,
        config=None if config is None else str(Path(config).absolute()),
        announce=announce,
    )
    raise typer.Exit(code)


def ingest(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL]…", help="Models that have to be ready; none: all that have a card."),
    ] = None,
    host: Host = None,
    port: Port = None,
    grpc_port: GrpcPort = None,
    model_path: ModelPath = None,
    data: Data = None,
    broker: Broker = None,
    store: Store = None,
    config: Config = None,
    log_level: LogLevel = None,
) -> None:
    """Run one ingest: takes requests in, answers when they are durable, and shows results."""
    settings = settings_of(
        config,
        host=host,
        port=port,
        grpc_port=grpc_port,
        model_path=model_path,
        data=data,
        broker=broker,
        store=store,
        log_level=log_level,
    )
    _run("ingest", settings, models or ())


def inference(
    models: Models,
    model_path: ModelPath = None,
    data: Data = None,
    broker: Broker = None,
    store: Store = None,
    strict: Strict = False,
    config: Config = None,
    log_level: LogLevel = None,
) -> None:
    """Run one inference process: claims messages, runs models, commits results."""
    settings = settings_of(config, model_path=model_path, data=data, broker=broker, store=store, log_level=log_level)
    _run("inference", settings, models, strict=strict)


def delivery(
    data: Data = None,
    store: Store = None,
    config: Config = None,
    log_level: LogLevel = None,
) -> None:
    """Run one delivery process: sends results to their destinations."""
    _run("delivery", settings_of(config, data=data, store=store, log_level=log_level), ())


def _both(url: str, grpc: str) -> str:
    return f"{url} and {grpc}" if grpc else url


def _run(service: str, settings: Any, models: Sequence[str], *, strict: bool = False) -> None:
    raise typer.Exit(run_service(service, service_main(service), settings, models, strict=strict))
