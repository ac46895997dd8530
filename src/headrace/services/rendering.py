"""The request object: one shape for /requests/{id}, the pull route, its event and its webhook."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from headrace.errors import BY_CODE, HeadraceError, Internal
from headrace.message import ErrorRecord, Result
from headrace.services.door import RequestView
from headrace.services.statuses import error_object
from headrace.stores.base import Delivery
from headrace.tensor import InferAnswer, answer_object, decode_answer

__all__ = ["answer_of", "error_of", "pending_view", "record_of", "request_object", "view_of", "webhook_body"]

_encode = msgspec.json.Encoder().encode


def record_of(error: HeadraceError) -> ErrorRecord:
    """Return an error as a result keeps it."""
    return ErrorRecord(code=error.code, message=error.message, details=error.details)


def error_of(record: ErrorRecord) -> HeadraceError:
    """Make a kept error again, to be raised to a caller who waited for the result."""
    # A code that a newer version wrote: still our failure, still its words.
    return BY_CODE.get(record.code, Internal)(record.message, details=record.details)


def answer_of(result: Result) -> InferAnswer:
    """Return the answer of a result that succeeded."""
    return decode_answer(result.payload, result.header_length)


def request_object(
    result: Result, deliveries: Sequence[Delivery] = (), answer: InferAnswer | None = None
) -> dict[str, Any]:
    """Return the object that shows a finished request; `answer` is the decoded payload, where it is at hand."""
    shown: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    if result.error is None:
        shown = answer_object(answer_of(result) if answer is None else answer)
    else:
        error = error_object(result.error.code, result.error.message, result.error.details, result.request_id)
    return {
        "id": result.id,
        "status": "succeeded" if result.succeeded else "failed",
        "model": result.model,
        "model_version": result.model_version or None,
        "result": shown,
        "error": error,
        "deliveries": [_delivery_object(delivery) for delivery in deliveries],
    }


def webhook_body(result: Result, answer: InferAnswer | None = None) -> bytes:
    """Return the body that every attempt to deliver this result sends: frozen, so nothing in it may change.

    `deliveries` is empty therefore; `timestamp` is when the result was made.
    """
    finished = datetime.fromtimestamp(result.finished_at_ms / 1000, UTC)
    return _encode(
        {
            "type": "result.succeeded" if result.succeeded else "result.failed",
            "timestamp": finished.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "data": request_object(result, (), answer),
        }
    )


def view_of(result: Result, deliveries: Sequence[Delivery]) -> RequestView:
    """Return a finished request as the door shows it."""
    return RequestView(
        id=result.id,
        status="succeeded" if result.succeeded else "failed",
        model=result.model,
        model_version=result.model_version,
        body=_encode(request_object(result, deliveries)),
    )


def pending_view(id: str, model: str = "") -> RequestView:
    """Return an accepted request that has no result yet; "" where the model is not known."""
    shown: dict[str, Any] = {
        "id": id,
        "status": "pending",
        "model": model or None,
        "model_version": None,
        "result": None,
        "error": None,
        "deliveries": [],
    }
    return RequestView(id=id, status="pending", model=model, model_version="", body=_encode(shown))


def _delivery_object(delivery: Delivery) -> dict[str, Any]:
    return {
        "destination": delivery.destination,
        "state": delivery.state,
        "attempts": delivery.attempts,
        "next_at_ms": delivery.next_at_ms,
        "last_status": delivery.last_status,
        "last_error": delivery.last_error,
    }
