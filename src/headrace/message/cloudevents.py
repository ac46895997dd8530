"""CloudEvents 1.0.2 attributes of messages and results, for engines and sinks that carry headers.

Attributes are named without a prefix: HTTP and NATS put `ce-` before each (and percent-encode values), Kafka
`ce_`; reading takes any of them. `traceparent` and `tracestate` are the trace in which the message was accepted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import msgspec

from headrace.errors import InvalidRequest
from headrace.message.records import SCHEMA, ErrorRecord, Message, Result

__all__ = [
    "dead_letter_headers",
    "message_from_headers",
    "message_headers",
    "result_data",
    "result_from_headers",
    "result_headers",
    "sound_traceparent",
]

#: One source per kind: `source` and `id` together name one occurrence, and a result has its message's id.
_MESSAGE_SOURCE, _RESULT_SOURCE, _DEAD_SOURCE = "/headrace/requests", "/headrace/results", "/headrace/dead"
_MESSAGE_TYPE, _RESULT_TYPE, _DEAD_TYPE = "headrace.message.v", "headrace.result.v", "headrace.deadletter.v"
_BINARY, _JSON = "application/octet-stream", "application/json"

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]*)?")
_TRACESTATE_LENGTH_MAX = 512


def message_headers(message: Message) -> dict[str, str]:
    """Return the attributes of a message whose data is `message.payload`."""
    headers = {
        "specversion": "1.0",
        "id": message.id,
        "source": _MESSAGE_SOURCE,
        "type": f"{_MESSAGE_TYPE}{message.schema}",
        "subject": message.model,
        "time": _timestamp(message.accepted_at_ms),
        "datacontenttype": _BINARY,
        "headerlength": str(message.header_length),
        "signature": message.signature,
    }
    if message.expires_at_ms is not None:
        headers["expirytime"] = _timestamp(message.expires_at_ms)
    if message.destinations:
        headers["destinations"] = msgspec.json.encode(message.destinations).decode()
    _put(headers, "modelversion", message.version)
    _put(headers, "requestid", message.request_id or None)
    _put(headers, "clientid", message.client_id)
    _put(headers, "fingerprint", message.fingerprint)
    _put(headers, "replayof", message.replay_of)
    _put_trace(headers, message.traceparent, message.tracestate)
    return headers


def message_from_headers(headers: Mapping[str, str], payload: bytes) -> Message:
    """Make the message again; raises InvalidRequest naming the attribute. A malformed trace is left out."""
    found = _Attributes(headers)
    schema = found.schema(_MESSAGE_TYPE)
    traceparent = sound_traceparent(found.get("traceparent"))
    expires = found.get("expirytime")
    return Message(
        id=found.need("id"),
        model=found.need("subject"),
        version=found.get("modelversion"),
        signature=found.need("signature"),
        accepted_at_ms=found.time_ms("time"),
        expires_at_ms=None if expires is None else found.time_ms("expirytime"),
        destinations=found.destinations(),
        request_id=found.get("requestid") or "",
        client_id=found.get("clientid"),
        traceparent=traceparent,
        tracestate=found.get("tracestate") if traceparent else None,
        fingerprint=found.get("fingerprint"),
        replay_of=found.get("replayof"),
        schema=schema,
        header_length=found.header_length(payload),
        payload=payload,
    )


def dead_letter_headers(message: Message, *, error: ErrorRecord, attempts: int, dead_at_ms: int) -> dict[str, str]:
    """Return the attributes of a message that was given up on; its data is still `message.payload`.

    They are the message's own, so that it can be made again, and the reason; `time` is that of giving up.
    """
    return {
        **message_headers(message),
        "source": _DEAD_SOURCE,
        "type": f"{_DEAD_TYPE}{message.schema}",
        "time": _timestamp(dead_at_ms),
        "acceptedtime": _timestamp(message.accepted_at_ms),
        "attempts": str(attempts),
        "reasoncode": error.code,
        "reason": _one_line(error.message),
    }


def result_headers(result: Result) -> dict[str, str]:
    """Return the attributes of a result whose data is `result_data(result)`."""
    headers = {
        "specversion": "1.0",
        "id": result.id,
        "source": _RESULT_SOURCE,
        "type": f"{_RESULT_TYPE}{SCHEMA}",
        "subject": result.model,
        "time": _timestamp(result.finished_at_ms),
        "datacontenttype": _BINARY if result.succeeded else _JSON,
        "status": "succeeded" if result.succeeded else "failed",
        "acceptedtime": _timestamp(result.accepted_at_ms),
        "attempts": str(result.attempts),
        "headerlength": str(result.header_length),
    }
    _put(headers, "modelversion", result.model_version or None)
    _put(headers, "requestid", result.request_id or None)
    _put(headers, "clientid", result.client_id)
    _put_trace(headers, result.traceparent, None)
    return headers


def result_data(result: Result) -> bytes:
    """Return what a result carries: the answer in OIP binary form, or its error as JSON; never empty.

    (A Kafka record without a value would delete its key on a compacted topic.)
    """
    return result.payload if result.error is None else msgspec.json.encode(result.error)


def result_from_headers(headers: Mapping[str, str], data: bytes) -> Result:
    """Make the result again; raises InvalidRequest naming the attribute. A malformed trace is left out."""
    found = _Attributes(headers)
    found.schema(_RESULT_TYPE)
    status = found.need("status")
    error: ErrorRecord | None = None
    if status == "failed":
        try:
            error = msgspec.json.decode(data, type=ErrorRecord)
        except (msgspec.DecodeError, RecursionError) as cause:
            raise InvalidRequest("the data is no error of Headrace", details={"reason": "damaged"}) from cause
        data = b""
    elif status != "succeeded":
        raise _refused("status", "succeeded or failed")
    return Result(
        id=found.need("id"),
        model=found.need("subject"),
        model_version=found.get("modelversion") or "",
        accepted_at_ms=found.time_ms("acceptedtime"),
        finished_at_ms=found.time_ms("time"),
        attempts=found.whole("attempts"),
        request_id=found.get("requestid") or "",
        client_id=found.get("clientid"),
        traceparent=sound_traceparent(found.get("traceparent")),
        error=error,
        header_length=found.header_length(data),
        payload=data,
    )


def sound_traceparent(text: str | None) -> str | None:
    """Return a W3C `traceparent` as it is, or None for what is malformed (which is ignored, never an error)."""
    if text is None or len(text) > _TRACESTATE_LENGTH_MAX:
        return None
    found = _TRACEPARENT.fullmatch(text)
    if found is None or (text[:2] == "00" and found.group(1)):
        return None
    return text


class _Attributes:
    """Attributes as they were found, whatever prefix the binding put before them."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._found: dict[str, str] = {}
        for key, value in headers.items():
            name = key.lower()
            if name == "content-type":
                name = "datacontenttype"
            self._found[name[3:] if name.startswith(("ce-", "ce_")) else name] = value

    def get(self, name: str) -> str | None:
        return self._found.get(name)

    def need(self, name: str) -> str:
        value = self._found.get(name)
        if value is None:
            raise InvalidRequest(f"attribute `{name}` is missing", details={"reason": "not_ours", "attribute": name})
        return value

    def whole(self, name: str) -> int:
        text = self.need(name)
        if not (text.isascii() and text.isdigit() and len(text) < 20):
            raise _refused(name, "a whole number")
        return int(text)

    def time_ms(self, name: str) -> int:
        try:
            moment = datetime.fromisoformat(self.need(name))
            return (moment - _EPOCH) // _MILLISECOND
        except (ValueError, TypeError) as error:
            raise _refused(name, "a time of RFC 3339 with its zone") from error

    def header_length(self, payload: bytes) -> int:
        length = self.whole("headerlength")
        if length > len(payload):
            raise _refused("headerlength", f"at most {len(payload)}, which is all the data")
        return length

    def destinations(self) -> tuple[str, ...]:
        text = self._found.get("destinations")
        if text is None:
            return ()
        try:
            return msgspec.json.decode(text, type=tuple[str, ...])
        except (msgspec.DecodeError, RecursionError) as error:
            raise _refused("destinations", "a JSON list of URLs") from error

    def schema(self, type_: str) -> int:
        """Check that these are attributes of the wanted kind; return their schema."""
        if self.need("specversion") != "1.0":
            raise _refused("specversion", "1.0")
        said = self.need("type")
        number = said.removeprefix(type_)
        if number == said or not (number.isascii() and number.isdigit() and len(number) < 4):
            raise InvalidRequest(
                "these are not the headers of a message or a result of this kind",
                details={"reason": "not_ours", "expected": f"{type_}{SCHEMA}"},
            )
        if int(number) > SCHEMA:
            raise InvalidRequest(
                f"this has schema {number}; this version of Headrace reads up to {SCHEMA}",
                details={"reason": "newer_schema", "expected": SCHEMA, "actual": int(number)},
            )
        return int(number)


def _refused(attribute: str, expected: str) -> InvalidRequest:
    return InvalidRequest(
        f"attribute `{attribute}` must be {expected}",
        details={"reason": "damaged", "attribute": attribute, "expected": expected},
    )


def _one_line(text: str) -> str:
    """Attributes may hold no control characters."""
    return "".join(character if character.isprintable() else " " for character in text)


def _put(headers: dict[str, str], name: str, value: str | None) -> None:
    if value is not None:
        headers[name] = value


def _put_trace(headers: dict[str, str], traceparent: str | None, tracestate: str | None) -> None:
    sound = sound_traceparent(traceparent)
    if sound is None:
        return
    headers["traceparent"] = sound
    if tracestate and len(tracestate) <= _TRACESTATE_LENGTH_MAX and tracestate.isascii() and tracestate.isprintable():
        headers["tracestate"] = tracestate


def _timestamp(at_ms: int) -> str:
    """Return RFC 3339 in UTC with milliseconds."""
    return f"{(_EPOCH + at_ms * _MILLISECOND).isoformat(timespec='milliseconds')[:-6]}Z"
