"""The closed list of codes with their HTTP and gRPC statuses, and the one error object made of them.

It stands here and not in `web` because results, webhook bodies and the pull route carry the object too, and
they are rendered by processes that import no web server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.errors import HeadraceError

__all__ = ["GRPC", "HTTP", "error_object", "error_object_of"]

_ROWS: tuple[tuple[int, str, str], ...] = (
    (400, "INVALID_ARGUMENT", "invalid_json invalid_request missing_input unknown_input duplicate_input"),
    (400, "INVALID_ARGUMENT", "unknown_output shape_mismatch dtype_mismatch invalid_value"),
    (401, "UNAUTHENTICATED", "unauthenticated"),
    (403, "PERMISSION_DENIED", "forbidden"),
    (404, "NOT_FOUND", "model_not_found version_not_found request_not_found"),
    (405, "UNIMPLEMENTED", "method_not_allowed"),
    (410, "NOT_FOUND", "expired"),
    (413, "RESOURCE_EXHAUSTED", "too_large"),
    (415, "INVALID_ARGUMENT", "unsupported_media_type"),
    (422, "FAILED_PRECONDITION", "idempotency_conflict"),
    (429, "RESOURCE_EXHAUSTED", "overloaded"),
    (499, "CANCELLED", "cancelled"),
    (500, "INTERNAL", "model_failed model_load_failed out_of_memory internal"),
    (503, "UNAVAILABLE", "model_unavailable broker_unavailable store_unavailable not_ready"),
    (504, "DEADLINE_EXCEEDED", "deadline_exceeded"),
    (507, "UNAVAILABLE", "storage_full"),
)

#: code → HTTP status; in the order of the documented table.
HTTP: dict[str, int] = {code: http for http, _, codes in _ROWS for code in codes.split()}

#: code → name of the gRPC status.
GRPC: dict[str, str] = {code: grpc for _, grpc, codes in _ROWS for code in codes.split()}


def error_object(code: str, message: str, details: Mapping[str, Any], request_id: str) -> dict[str, Any]:
    """Return the error body of every route, result and webhook; `error` is a string, as OIP demands."""
    return {
        "error": message,
        "code": code,
        "details": dict(details),
        "request_id": request_id,
        "status": HTTP.get(code, 500),
    }


def error_object_of(error: HeadraceError, request_id: str) -> dict[str, Any]:
    """Return the error body of a raised error."""
    return error_object(error.code, error.message, error.details, request_id)
