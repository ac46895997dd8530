"""Every error that Headrace can answer with: a closed list, one class per code.

    HeadraceError
    ├── CallerError                 the request is at fault; the same request fails again
    │   ├── InvalidJson             invalid_json
    │   ├── InvalidRequest          invalid_request
    │   ├── MissingInput            missing_input
    │   ├── UnknownInput            unknown_input
    │   ├── DuplicateInput          duplicate_input
    │   ├── UnknownOutput           unknown_output
    │   ├── ShapeMismatch           shape_mismatch
    │   ├── DtypeMismatch           dtype_mismatch
    │   ├── InvalidValue            invalid_value
    │   ├── Unauthenticated         unauthenticated
    │   ├── Forbidden               forbidden
    │   ├── ModelNotFound           model_not_found
    │   ├── VersionNotFound         version_not_found
    │   ├── RequestNotFound         request_not_found
    │   ├── MethodNotAllowed        method_not_allowed
    │   ├── Expired                 expired
    │   ├── TooLarge                too_large
    │   ├── UnsupportedMediaType    unsupported_media_type
    │   ├── IdempotencyConflict     idempotency_conflict
    │   └── Cancelled               cancelled
    ├── BusyError                   nobody is at fault; the same request may succeed later
    │   ├── Overloaded              overloaded
    │   └── DeadlineExceeded        deadline_exceeded
    └── OwnError                    we are at fault; only these count against /health
        ├── ModelFailed             model_failed
        ├── ModelLoadFailed         model_load_failed
        ├── OutOfMemory             out_of_memory
        ├── Internal                internal
        ├── ModelUnavailable        model_unavailable
        ├── BrokerUnavailable       broker_unavailable
        ├── StoreUnavailable        store_unavailable
        ├── NotReady                not_ready
        └── StorageFull             storage_full

An error knows its code, whose fault it is and whether to retry. It does not know HTTP or gRPC: `web`
maps codes to statuses. The docstring of a class is its default message. Foreign exceptions are turned into
these once, at the border, by the one file that imports the foreign library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

__all__ = [
    "BY_CODE",
    "BrokerUnavailable",
    "BusyError",
    "CallerError",
    "Cancelled",
    "DeadlineExceeded",
    "DtypeMismatch",
    "DuplicateInput",
    "Expired",
    "Forbidden",
    "HeadraceError",
    "IdempotencyConflict",
    "Internal",
    "InvalidJson",
    "InvalidRequest",
    "InvalidValue",
    "MethodNotAllowed",
    "MissingInput",
    "ModelFailed",
    "ModelLoadFailed",
    "ModelNotFound",
    "ModelUnavailable",
    "NotReady",
    "OutOfMemory",
    "Overloaded",
    "OwnError",
    "RequestNotFound",
    "ShapeMismatch",
    "StorageFull",
    "StoreUnavailable",
    "TooLarge",
    "Unauthenticated",
    "UnknownInput",
    "UnknownOutput",
    "UnsupportedMediaType",
    "VersionNotFound",
    "text_of",
]


#: What an error carries is written, sent and logged whole; more than this of a text or a list helps nobody.
TEXT_CHARS_MAX = 4000
ITEMS_MAX = 1000
_DEPTH_MAX = 8


class HeadraceError(Exception):
    """Something went wrong."""

    code: ClassVar[str] = ""
    #: "caller", "nobody" or "ours"; only "ours" counts against /health and makes a dead letter.
    fault: ClassVar[str] = "ours"
    #: True where the same request, unchanged, may succeed later.
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str | None = None,
        /,
        *,
        details: Mapping[str, Any] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """Hold a one-line message for people and details for programs.

        Whatever is given, both can be written as JSON afterwards: models raise these too, with whatever they have at
        hand. `retry_after_s` is a computed estimate, never a guess; None where there is none.
        """
        self.message = text_of(message) if message else (type(self).__doc__ or "").strip().split("\n")[0].rstrip(".")
        self.details: dict[str, Any] = _plain(details, 0) if details else {}
        self.retry_after_s = retry_after_s
        super().__init__(self.message)


def text_of(value: object) -> str:
    """Return what anything says of itself, as text that every wire takes; its type's name where it cannot say."""
    try:
        text = str(value)
    except Exception:
        text = type(value).__name__
    if not text.isascii():
        # Half a surrogate pair is no UTF-8; Python makes them of bytes that are no text, such as names of files.
        text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= TEXT_CHARS_MAX else f"{text[:TEXT_CHARS_MAX]}… ({len(text)} characters)"


def _plain(value: Any, depth: int) -> Any:
    """Return details as JSON can hold them: what cannot be written becomes text, what is not finite None."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return text_of(value)
    if isinstance(value, int):
        return int(value) if -(1 << 63) <= value < 1 << 64 else f"an integer of {value.bit_length()} bits"
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if depth < _DEPTH_MAX:
        if isinstance(value, Mapping):
            return {text_of(key): _plain(part, depth + 1) for key, part in list(value.items())[:ITEMS_MAX]}
        if isinstance(value, list | tuple | set | frozenset):
            return [_plain(part, depth + 1) for part in list(value)[:ITEMS_MAX]]
        # An array or a number of numpy's; this floor knows no numpy.
        if hasattr(value, "tolist") and getattr(value, "size", ITEMS_MAX) < ITEMS_MAX:
            return _plain(value.tolist(), depth + 1)
    return f"<{type(value).__name__}>"


class CallerError(HeadraceError):
    """The request cannot be answered as it is."""

    fault = "caller"


class BusyError(HeadraceError):
    """There is no capacity for the request just now."""

    fault = "nobody"
    retryable = True


class OwnError(HeadraceError):
    """Headrace failed."""


class InvalidJson(CallerError):
    """The body is not valid JSON."""

    code = "invalid_json"


class InvalidRequest(CallerError):
    """The request is malformed."""

    code = "invalid_request"


class MissingInput(CallerError):
    """A required input is missing."""

    code = "missing_input"


class UnknownInput(CallerError):
    """The model has no such input."""

    code = "unknown_input"


class DuplicateInput(CallerError):
    """An input is given twice."""

    code = "duplicate_input"


class UnknownOutput(CallerError):
    """The model has no such output."""

    code = "unknown_output"


class ShapeMismatch(CallerError):
    """Shape mismatch."""

    code = "shape_mismatch"


class DtypeMismatch(CallerError):
    """Datatype mismatch."""

    code = "dtype_mismatch"


class InvalidValue(CallerError):
    """A value does not fit its datatype."""

    code = "invalid_value"


class Unauthenticated(CallerError):
    """Credentials are missing or wrong."""

    code = "unauthenticated"


class Forbidden(CallerError):
    """The credentials do not allow this."""

    code = "forbidden"


class ModelNotFound(CallerError):
    """There is no such model."""

    code = "model_not_found"


class VersionNotFound(CallerError):
    """The model has no such version."""

    code = "version_not_found"


class RequestNotFound(CallerError):
    """There is nothing here: no such request was accepted."""

    code = "request_not_found"


class MethodNotAllowed(CallerError):
    """The method is not allowed here."""

    code = "method_not_allowed"


class Expired(CallerError):
    """The request was accepted too long ago; its result is no longer kept."""

    code = "expired"


class TooLarge(CallerError):
    """The request is too large."""

    code = "too_large"


class UnsupportedMediaType(CallerError):
    """The content type or encoding is not supported."""

    code = "unsupported_media_type"


class IdempotencyConflict(CallerError):
    """The Idempotency-Key was used before with another request."""

    code = "idempotency_conflict"


class Cancelled(CallerError):
    """The request was cancelled."""

    code = "cancelled"


class Overloaded(BusyError):
    """There is too much work waiting."""

    code = "overloaded"


class DeadlineExceeded(BusyError):
    """The deadline passed before there was an answer."""

    code = "deadline_exceeded"


class ModelFailed(OwnError):
    """The model failed on this request."""

    code = "model_failed"


class ModelLoadFailed(OwnError):
    """The model could not be loaded."""

    code = "model_load_failed"


class OutOfMemory(OwnError):
    """There was not enough memory for this request."""

    code = "out_of_memory"


class Internal(OwnError):
    """An internal error occurred; its cause is in the log."""

    code = "internal"


class ModelUnavailable(OwnError):
    """The model is not able to answer now."""

    code = "model_unavailable"
    retryable = True


class BrokerUnavailable(OwnError):
    """The broker cannot be reached."""

    code = "broker_unavailable"
    retryable = True


class StoreUnavailable(OwnError):
    """The store cannot be reached."""

    code = "store_unavailable"
    retryable = True


class NotReady(OwnError):
    """The service is not ready."""

    code = "not_ready"
    retryable = True


class StorageFull(OwnError):
    """There is no space left to keep this request."""

    code = "storage_full"
    retryable = True


def _leaves(parent: type[HeadraceError]) -> dict[str, type[HeadraceError]]:
    found = {parent.code: parent} if parent.code else {}
    for child in parent.__subclasses__():
        found |= _leaves(child)
    return found


#: The closed list: code → class. An error read back from a stored result is made again from this.
BY_CODE: dict[str, type[HeadraceError]] = dict(sorted(_leaves(HeadraceError).items()))
