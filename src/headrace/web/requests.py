"""Accepted requests: polling, long polling, cancelling, server-sent events and the pull route."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator

import msgspec

from headrace.errors import HeadraceError, InvalidRequest, RequestNotFound
from headrace.services.door import Requests, RequestView
from headrace.web.errors import error_body
from headrace.web.exchange import Answer, Exchange
from headrace.web.headers import read_seconds
from headrace.web.routes import Doc, Parameter, Route
from headrace.web.site import Site

__all__ = ["ROUTES"]

LIMIT_DEFAULT = 100
LIMIT_MAX = 1000
CURSOR_LENGTH_MAX = 256
#: How often a stream of server-sent events shows that it is alive.
HEARTBEAT_S = 15.0

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_CURSOR = re.compile(r"[!-~]*")
_encode = msgspec.json.Encoder().encode
_NO_STORE = ((b"cache-control", b"no-store"),)
_STREAM_HEADERS = ((b"cache-control", b"no-store"), (b"x-accel-buffering", b"no"))


def _requests(site: Site) -> Requests:
    if site.door.requests is None:
        raise RequestNotFound("There is no queue behind this service: every request is answered at once")
    return site.door.requests


def _id(exchange: Exchange) -> str:
    found = exchange.params["id"]
    if _ID.fullmatch(found) is None:
        raise RequestNotFound
    return found


async def _look(site: Site, requests: Requests, id: str, wait_s: float) -> RequestView:
    """Look, waiting at most `wait_s`; an orderly stop ends the wait, not the request."""
    if wait_s <= 0 or site.draining:
        return await requests.look(id, 0)
    look = asyncio.ensure_future(requests.look(id, wait_s))
    stop = asyncio.ensure_future(site.stopping.wait())
    try:
        await asyncio.wait({look, stop}, return_when=asyncio.FIRST_COMPLETED)
        return look.result() if look.done() else await requests.look(id, 0)
    finally:
        look.cancel()
        stop.cancel()


def _show(exchange: Exchange, view: RequestView) -> Answer:
    exchange.model, exchange.model_version = view.model, view.model_version
    return Answer(view.body, status=202 if view.status == "pending" else 200, headers=_NO_STORE)


async def _poll(site: Site, exchange: Exchange) -> Answer:
    requests, id = _requests(site), _id(exchange)
    wait = exchange.query().get("wait")
    wait_s = 0.0
    if wait is not None:
        wait_s = read_seconds("wait", wait.encode("utf-8"), seconds_max=site.settings.wait_s_max) or 0.0
    exchange.stage = "work"
    return _show(exchange, await _look(site, requests, id, wait_s))


async def _cancel(site: Site, exchange: Exchange) -> Answer:
    view = await _requests(site).cancel(_id(exchange))
    return _show(exchange, view)


async def _events(site: Site, exchange: Exchange) -> Answer:
    requests, id = _requests(site), _id(exchange)
    first = await requests.look(id, 0)
    exchange.model, exchange.model_version = first.model, first.model_version
    exchange.stage = "work"
    return Answer(
        content_type=b"text/event-stream",
        headers=_STREAM_HEADERS,
        stream=_stream(site, exchange, requests, id, first),
    )


async def _stream(
    site: Site, exchange: Exchange, requests: Requests, id: str, view: RequestView
) -> AsyncIterator[bytes]:
    yield b"retry: 1000\n" + _event(view.status, view.body)
    try:
        while view.status == "pending" and not site.draining:
            view = await _look(site, requests, id, HEARTBEAT_S)
            yield b": waiting\n\n" if view.status == "pending" else _event(view.status, view.body)
    except HeadraceError as error:
        # The status line has gone out; the reader learns of the failure by an event of its own.
        exchange.error = error
        yield _event("error", error_body(error, exchange.request_id))


def _event(name: str, data: bytes) -> bytes:
    return b"event: " + name.encode("ascii") + b"\ndata: " + data + b"\n\n"


async def _pull(site: Site, exchange: Exchange) -> Answer:
    requests = _requests(site)
    query = exchange.query()
    cursor = query.get("after", "")
    if len(cursor) > CURSOR_LENGTH_MAX or _CURSOR.fullmatch(cursor) is None:
        raise InvalidRequest("`after` is not a cursor that this service gave", details={"input": "after"})
    given = query.get("limit", str(LIMIT_DEFAULT))
    if not (given.isascii() and given.isdigit() and 0 < int(given[:9]) <= LIMIT_MAX and len(given) < 9):
        raise InvalidRequest(
            f"`limit` must be a whole number from 1 to {LIMIT_MAX}",
            details={"input": "limit", "expected": f"1 to {LIMIT_MAX}", "actual": given[:20]},
        )
    views, following = await requests.pull(cursor, int(given))
    results = b",".join(view.body for view in views)
    return Answer(b'{"results":[' + results + b'],"next":' + _encode(following) + b"}", headers=_NO_STORE)


_REQUEST = {"$ref": "#/components/schemas/Request"}
_ID_PARAMETER = Parameter("id", "path", "The id from the `Location` of the answer that accepted it.")
_EVENTS = {"type": "string", "description": "Events `pending`, `succeeded`, `failed` with the request object."}

ROUTES = (
    Route(
        "GET",
        "/requests/{id}",
        _poll,
        Doc(
            "The state of an accepted request",
            "202 while pending, 200 with its result, 404 if it was never accepted, 410 when it is too old. "
            "Store or broker down is 503, never a wrong 404.",
            tag="requests",
            parameters=(
                _ID_PARAMETER,
                Parameter(
                    "wait",
                    "query",
                    "Seconds to wait for the result (long polling).",
                    {"type": "number", "minimum": 0},
                ),
            ),
            answers={
                200: ("Succeeded or failed", "application/json", _REQUEST),
                202: ("Pending", "application/json", _REQUEST),
            },
            errors=(400, 404, 410, 503),
        ),
        kind="lookup",
    ),
    Route(
        "DELETE",
        "/requests/{id}",
        _cancel,
        Doc(
            "Cancel an accepted request",
            "Commits a failed result `cancelled` if there is no result yet; answers what is the result.",
            tag="requests",
            parameters=(_ID_PARAMETER,),
            answers={200: ("What is the result", "application/json", _REQUEST)},
            errors=(404, 410, 503),
        ),
        kind="lookup",
    ),
    Route(
        "GET",
        "/requests/{id}/events",
        _events,
        Doc(
            "The state of an accepted request, as server-sent events",
            "The stream ends after the result. A comment every 15 seconds shows that it is alive.",
            tag="requests",
            parameters=(_ID_PARAMETER,),
            answers={200: ("The events", "text/event-stream", _EVENTS)},
            errors=(404, 410, 503),
        ),
    ),
    Route(
        "GET",
        "/results",
        _pull,
        Doc(
            "Results in commit order",
            "Start without `after`, go on from `next`. No result is skipped.",
            tag="requests",
            parameters=(
                Parameter("after", "query", "The cursor to go on from."),
                Parameter(
                    "limit",
                    "query",
                    "How many at most.",
                    {"type": "integer", "minimum": 1, "maximum": LIMIT_MAX, "default": LIMIT_DEFAULT},
                ),
            ),
            answers={
                200: (
                    "Results and the next cursor",
                    "application/json",
                    {
                        "type": "object",
                        "required": ["results", "next"],
                        "properties": {
                            "results": {"type": "array", "items": _REQUEST},
                            "next": {"type": "string"},
                        },
                    },
                )
            },
            errors=(400, 404, 503),
        ),
        kind="lookup",
    ),
)
