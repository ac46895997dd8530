"""`headrace export`: documents for other tools."""

from __future__ import annotations

import typer

from headrace.cli.options import Json
from headrace.cli.show import show_json

__all__ = ["app", "asyncapi", "openapi"]

app = typer.Typer(help="Print documents that other tools read.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def asyncapi(as_json: Json = False) -> None:
    """Print the topics and their messages as an AsyncAPI 3.0 document."""
    from headrace.export.asyncapi import asyncapi_document

    show_json(asyncapi_document(), compact=as_json)


@app.command()
def openapi(as_json: Json = False) -> None:
    """Print the HTTP routes as an OpenAPI document."""
    from headrace.web.app import ROUTES
    from headrace.web.docs import document_of

    show_json(document_of(ROUTES), compact=as_json)
