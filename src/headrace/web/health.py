"""How it goes: /health, and the live and ready routes of the Open Inference Protocol."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from headrace.errors import NotReady
from headrace.web.errors import error_body
from headrace.web.exchange import Answer, Exchange
from headrace.web.routes import Doc, Route
from headrace.web.site import Site

__all__ = ["ROUTES", "iso_time", "not_ready_answer"]

_encode = msgspec.json.Encoder().encode


async def _live(site: Site, exchange: Exchange) -> Answer:
    return Answer(b'{"live":true}')


async def _ready(site: Site, exchange: Exchange) -> Answer:
    reasons = site.reasons_not_ready()
    if not reasons:
        return Answer(b'{"ready":true}')
    return not_ready_answer(site, exchange, {"ready": False}, reasons)


def not_ready_answer(site: Site, exchange: Exchange, first: dict[str, Any], reasons: list[str]) -> Answer:
    """Return a 503 that OIP clients and people both understand."""
    error = NotReady("The service is not ready", details={"reasons": reasons})
    exchange.error = error
    body = first | msgspec.json.decode(error_body(error, exchange.request_id))
    return Answer(_encode(body), status=503)


async def _health(site: Site, exchange: Exchange) -> Answer:
    reasons = site.reasons_not_ready()
    models = site.door.models()
    updated = [state.updated_at_ms for state in models if state.updated_at_ms is not None]
    sole = site.sole()
    body = {
        "status": "unhealthy" if reasons else site.window.status(),
        "model_version": sole.version if sole is not None else None,
        "latency_p95": site.window.latency_p95_ms(),
        "error_rate": round(site.window.error_rate(), 6),
        "last_updated": iso_time(max(updated)) if updated else None,
        "models": [
            {
                "name": state.name,
                "version": state.version,
                "ready": state.ready,
                "reason": state.reason,
                "last_updated": iso_time(state.updated_at_ms),
            }
            for state in models
        ],
    }
    if reasons:
        error = NotReady(f"Not ready: {reasons[0]}", details={"reasons": reasons})
        exchange.error = error
        body |= msgspec.json.decode(error_body(error, exchange.request_id))
        # The document's own word for its state wins over the number that the error body has there.
        body["status"] = "unhealthy"
    return Answer(_encode(body), status=503 if reasons else 200)


def iso_time(at_ms: int | None) -> str | None:
    """Return a wall-clock time as RFC 3339, in UTC."""
    if at_ms is None:
        return None
    moment = datetime.fromtimestamp(at_ms / 1000, tz=UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


_STATE = {
    "type": "object",
    "required": ["name", "version", "ready", "reason", "last_updated"],
    "properties": {
        "name": {"type": "string"},
        "version": {"type": "string"},
        "ready": {"type": "boolean"},
        "reason": {"type": "string"},
        "last_updated": {"type": ["string", "null"], "format": "date-time"},
    },
}
_HEALTH = {
    "type": "object",
    "required": ["status", "model_version", "latency_p95", "error_rate", "last_updated", "models"],
    "properties": {
        "status": {"enum": ["ok", "degraded", "unhealthy"]},
        "model_version": {
            "type": ["string", "null"],
            "description": "The version served; null where several models are.",
        },
        "latency_p95": {"type": ["number", "null"], "description": "Milliseconds; null before the first answer."},
        "error_rate": {"type": "number", "description": "Our own failures per request."},
        "last_updated": {"type": ["string", "null"], "format": "date-time", "description": "Of the newest version."},
        "models": {"type": "array", "items": _STATE},
    },
}

ROUTES = (
    Route(
        "GET",
        "/health",
        _health,
        Doc(
            "How the service does",
            "`ok` and `degraded` (more than 5 % own failures) answer 200, `unhealthy` (more than 10 %, or not "
            "ready) 503. Counted over a sliding window with at least 20 requests.",
            tag="health",
            answers={
                200: ("ok or degraded", "application/json", _HEALTH),
                503: ("unhealthy", "application/json", _HEALTH),
            },
        ),
    ),
    Route(
        "GET",
        "/v2/health/live",
        _live,
        Doc(
            "Whether the process runs",
            "200 also while models load and while the service stops.",
            tag="health",
            answers={
                200: ("alive", "application/json", {"type": "object", "properties": {"live": {"const": True}}}),
            },
        ),
    ),
    Route(
        "GET",
        "/v2/health/ready",
        _ready,
        Doc(
            "Whether requests would be answered now",
            "503 names the reasons: no model, a model that loads or failed to load, a broker or store that is "
            "down, more than 10 % own failures, or a stop.",
            tag="health",
            answers={
                200: ("ready", "application/json", {"type": "object", "properties": {"ready": {"const": True}}}),
            },
            errors=(503,),
        ),
    ),
)
