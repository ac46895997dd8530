"""The options that commands share, and the settings that come of them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from headrace.assembly import load_settings
from headrace.settings import Settings

__all__ = [
    "AdminPort",
    "Broker",
    "Config",
    "Data",
    "GrpcPort",
    "Host",
    "Json",
    "LogLevel",
    "ModelPath",
    "Models",
    "Port",
    "Store",
    "Strict",
    "Url",
    "Workers",
    "settings_of",
]

Models = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL…", help="PATH, NAME=PATH or python:package.module:callable; a file or a version directory."
    ),
]
Host = Annotated[str | None, typer.Option("--host", help="Address to listen on.", show_default="127.0.0.1")]
Port = Annotated[int | None, typer.Option("--port", help="Port to listen on; 0 takes a free one.", show_default="8000")]
AdminPort = Annotated[
    int | None,
    typer.Option("--admin-port", help="Port of the admin listener, on loopback: load and unload.", show_default="none"),
]
GrpcPort = Annotated[
    int | None,
    typer.Option("--grpc-port", help="Port to listen on for gRPC too; 0 takes a free one.", show_default="no gRPC"),
]
Workers = Annotated[
    int | None,
    typer.Option("--workers", help="Runners (serve) or inference processes (up).", show_default="1"),
]
ModelPath = Annotated[
    str | None, typer.Option("--model-path", help="Folder that relative paths of models start from.", show_default=".")
]
Data = Annotated[str | None, typer.Option("--data", help="Folder for everything that is kept.", show_default="data")]
Broker = Annotated[
    str | None,
    typer.Option("--broker", help="Where topics live.", show_default="sqlite:///DATA/headrace.db"),
]
Store = Annotated[
    str | None,
    typer.Option("--store", help="Where results live.", show_default="sqlite:///DATA/headrace.db"),
]
Config = Annotated[
    str | None, typer.Option("--config", help="A file of settings.", show_default="headrace.toml, if it is there")
]
LogLevel = Annotated[
    str | None,
    typer.Option("--log-level", help="Least serious line that is logged to stderr.", show_default="info"),
]
Strict = Annotated[bool, typer.Option("--strict", help="Do not start if any of the models cannot be loaded.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
Url = Annotated[
    str | None, typer.Option("--url", help="Where the server listens.", show_default="http://127.0.0.1:8000")
]


def settings_of(config: str | None, **flags: Any) -> Settings:
    """Return the settings in force; flags that were not given are None. Raises SettingsError."""
    return load_settings(flags, file=config)
