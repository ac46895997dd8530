"""Errors as HTTP answers: the body, the status, `Retry-After`, and the documented table."""

from __future__ import annotations

import math

import msgspec

from headrace.errors import BY_CODE, HeadraceError
from headrace.services.statuses import GRPC, HTTP, error_object_of
from headrace.web.exchange import Answer

__all__ = ["documented_rows", "error_answer", "error_body"]

# An error whose details cannot be written must still be answered: an unknown object becomes its type's name.
_encode = msgspec.json.Encoder(enc_hook=lambda value: type(value).__name__).encode


def error_body(error: HeadraceError, request_id: str, status: int | None = None) -> bytes:
    """Return the JSON body; `status` overrides the table for what only HTTP knows (408)."""
    body = error_object_of(error, request_id)
    if status is not None:
        body["status"] = status
    try:
        return _encode(body)
    except (UnicodeEncodeError, TypeError, ValueError):
        # Details may quote a caller's string, and a string may hold a lone surrogate.
        body["details"] = {}
        body["error"] = body["error"].encode("ascii", "replace").decode("ascii")
        return _encode(body)


def error_answer(error: HeadraceError, request_id: str, status: int | None = None) -> Answer:
    """Return the answer for an error, with Retry-After where one was computed (whole seconds, rounded up)."""
    headers: list[tuple[bytes, bytes]] = []
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s))))
    return Answer(
        error_body(error, request_id, status),
        status=status or HTTP.get(error.code, 500),
        headers=headers,
    )


def documented_rows() -> list[tuple[str, int, str, str, bool, str]]:
    """Return the closed list, sorted by status: code, HTTP, gRPC, whose fault, whether to retry, meaning."""
    rows = [
        (code, http, GRPC[code], cls.fault, cls.retryable, (cls.__doc__ or "").strip().split("\n")[0])
        for code, http in HTTP.items()
        for cls in (BY_CODE[code],)
    ]
    return sorted(rows, key=lambda row: (row[1], row[0]))
