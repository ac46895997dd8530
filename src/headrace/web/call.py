"""The way through the door: what came around a request becomes a Call, what comes back becomes an answer."""

from __future__ import annotations

import msgspec

from headrace.errors import DeadlineExceeded, InvalidRequest
from headrace.services.door import Accepted, Call
from headrace.tensor import InferAnswer, InferRequest
from headrace.web.exchange import Answer, Exchange
from headrace.web.headers import Preferences, read_destinations, read_key, read_preferences, read_seconds
from headrace.web.routes import Parameter
from headrace.web.site import Site

__all__ = ["PARAMETERS", "through"]

#: A caller may wait this long at most, whatever it asks for.
DEADLINE_S_MAX = 24 * 3600.0

_encode = msgspec.json.Encoder().encode

PARAMETERS = (
    Parameter(
        "Prefer",
        "header",
        "`respond-async`: 202 at once. `wait=N`: the answer if it is there within N seconds, else 202. "
        "Only with a queue; the short road always answers at once.",
    ),
    Parameter(
        "Idempotency-Key",
        "header",
        "Bare or quoted. The same key with the same request is the same message; with another request 422.",
    ),
    Parameter(
        "Webhook-URL",
        "header",
        "Where the result is sent too; repeatable, or several separated by commas. Only with a queue.",
    ),
    Parameter(
        "Request-Timeout",
        "header",
        "Seconds after which nobody wants the answer any more.",
        {"type": "number", "minimum": 0},
    ),
    Parameter(
        "X-Request-Id",
        "header",
        "Correlation only: 1 to 128 of `A-Za-z0-9._-` is echoed and logged, anything else is replaced.",
    ),
    Parameter("traceparent", "header", "W3C trace context; a malformed one is ignored."),
)


async def through(site: Site, exchange: Exchange, request: InferRequest) -> InferAnswer | Answer:
    """Take a request through the door. Returns the inference's answer, or the 202 of an accepted one.

    Raises HeadraceError; where the message was accepted before, the exchange carries its Location.
    """
    call, preferences = _make_call(site, exchange)
    if exchange.span is not None:
        exchange.span.set(model=request.model, model_version=exchange.model_version)
        exchange.span.end()
    try:
        answer = await site.door.answer(request, call)
    finally:
        # Also for failures and for clients that went: the log says how far it got.
        exchange.queue_time_ms = call.queue_time_ms
        if call.model_version:
            exchange.model_version = call.model_version
        if call.accepted_id is not None:
            exchange.location = f"/requests/{call.accepted_id}"
    if isinstance(answer, Accepted):
        return _accepted(exchange, answer, preferences)
    exchange.model_version = answer.version or exchange.model_version
    if preferences is not None and exchange.location and preferences.patience_s:
        exchange.extra_headers = _applied(preferences)
    return answer


def _make_call(site: Site, exchange: Exchange) -> tuple[Call, Preferences | None]:
    headers = exchange.headers
    call = Call(exchange.request_id)
    if exchange.span is not None:
        call.traceparent, call.tracestate = exchange.span.context.traceparent, exchange.span.context.tracestate
    preferences = None
    if b"prefer" in headers:
        preferences = read_preferences(exchange.every(b"prefer"), wait_s_max=site.settings.wait_s_max)
        call.wait_s = preferences.patience_s
    if b"idempotency-key" in headers:
        call.key = read_key(exchange.every(b"idempotency-key"))
    if b"webhook-url" in headers:
        call.destinations = read_destinations(exchange.every(b"webhook-url"))
        if call.destinations and site.door.requests is None:
            raise InvalidRequest(
                "There is no queue behind this service, so that no webhook can be promised",
                details={"header": "Webhook-URL", "expected": "none", "actual": len(call.destinations)},
            )
    if b"request-timeout" in headers:
        call.deadline_s = read_seconds("Request-Timeout", headers[b"request-timeout"], seconds_max=DEADLINE_S_MAX)
    if exchange.deadline_s is not None:
        call.deadline_s = min(exchange.deadline_s, DEADLINE_S_MAX if call.deadline_s is None else call.deadline_s)
    return call, preferences


def _accepted(exchange: Exchange, accepted: Accepted, preferences: Preferences | None) -> Answer:
    exchange.location = f"/requests/{accepted.id}"
    if accepted.deadline_passed:
        raise DeadlineExceeded(
            "The answer was not there in time; the request is accepted and will be answered",
            details={"id": accepted.id, "location": exchange.location},
        )
    if preferences is not None:
        exchange.extra_headers = _applied(preferences)
    body = _encode({"id": accepted.id, "status": "accepted", "model": accepted.model})
    return Answer(body, status=202)


def _applied(preferences: Preferences) -> tuple[tuple[bytes, bytes], ...]:
    names = ["respond-async"] if preferences.respond_async else []
    if preferences.wait_s is not None:
        names.append(f"wait={preferences.wait_s:g}")
    return ((b"preference-applied", ", ".join(names).encode("ascii")),) if names else ()
