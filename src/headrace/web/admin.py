"""The admin listener: loading and unloading models. On loopback only, and not for web pages.

Source: triton-inference-server/server, docs/protocol/extension_model_repository.md.
"""

from __future__ import annotations

import ipaddress
from typing import Protocol

import msgspec

from headrace.clock import Clock
from headrace.errors import Forbidden, InvalidJson, InvalidRequest
from headrace.services.door import Door
from headrace.telemetry.logs import Logs
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.trace import Tracer
from headrace.web import health, oip
from headrace.web.app import App
from headrace.web.exchange import Answer, Exchange
from headrace.web.routes import Doc, Handler, Parameter, Route
from headrace.web.settings import WebSettings
from headrace.web.site import Site

__all__ = ["Repository", "create_admin_app"]


class Repository(Protocol):
    """What can be loaded and unloaded."""

    async def load(self, name: str) -> None:
        """Load a model's versions as they are on disk now, replacing those that serve without a failed request.

        Raises ModelNotFound for a name that this process was not started with, ModelLoadFailed.
        """

    async def unload(self, name: str) -> None:
        """Let a model's versions finish what they have, and free them. Raises ModelNotFound."""


class _Body(msgspec.Struct):
    parameters: dict[str, msgspec.Raw] = {}


_decode = msgspec.json.Decoder(_Body).decode


def create_admin_app(
    door: Door, repository: Repository, settings: WebSettings, metrics: Metrics, logs: Logs, clock: Clock
) -> App:
    """Return the application of the admin listener."""

    async def load(site: Site, exchange: Exchange) -> Answer:
        await _checked(exchange, ())
        await repository.load(exchange.params["model"])
        return Answer()

    async def unload(site: Site, exchange: Exchange) -> Answer:
        await _checked(exchange, ("unload_dependents",))
        await repository.unload(exchange.params["model"])
        return Answer()

    async def nothing() -> bytes:
        return b""

    site = Site(door, settings, metrics, logs, clock, Tracer(clock), nothing)
    routes = (_route("load", "Load", load), _route("unload", "Unload", unload), oip.INDEX_ROUTE, *health.ROUTES)
    return App(site, routes)


async def _checked(exchange: Exchange, known: tuple[str, ...]) -> None:
    """Refuse web pages, and parameters that would ask for what is not done. Raises Forbidden, InvalidRequest."""
    headers = exchange.headers
    # A page in somebody's browser may send requests to this machine, under a name of its own that leads here too.
    if b"origin" in headers or not _is_loopback(headers.get(b"host", b"localhost")):
        raise Forbidden("The admin listener does not answer web pages", details={"header": "Origin"})
    body = await exchange.body()
    try:
        given = _decode(body) if body.strip() else _Body()
    except msgspec.ValidationError as error:
        raise InvalidRequest("The body must be empty or an object", details={"reason": str(error)}) from error
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise InvalidJson("The body is not valid JSON") from error
    for name in given.parameters:
        if name not in known:
            raise InvalidRequest(
                "A model is loaded from its files as they are: neither a configuration nor files can be sent",
                details={"parameter": name[:64], "expected": list(known)},
            )


def _is_loopback(host: bytes) -> bool:
    text = host.decode("latin-1").rsplit(":", 1)[0] if not host.endswith(b"]") else host.decode("latin-1")
    try:
        return text.lower() == "localhost" or ipaddress.ip_address(text.strip("[]")).is_loopback
    except ValueError:
        return False


def _route(verb: str, word: str, handler: Handler) -> Route:
    doc = Doc(f"{word} a model", tag="models", parameters=(Parameter("model", "path", "The model's name."),))
    return Route("POST", f"/v2/repository/models/{{model}}/{verb}", handler, doc)
