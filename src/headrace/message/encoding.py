"""The bytes of a Message and of a Result: three letters, the schema's number, then MessagePack."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from headrace.errors import InvalidRequest
from headrace.message.records import SCHEMA, ErrorRecord, Message, Result

__all__ = ["decode_message", "decode_result", "encode_message", "encode_result", "stored_result"]

_MESSAGE, _RESULT = b"HRM", b"HRR"
_HEAD = 4

_Record = TypeVar("_Record", Message, Result)

_ENCODE = msgspec.msgpack.Encoder().encode
_MESSAGE_DECODER = msgspec.msgpack.Decoder(Message)
_RESULT_DECODER = msgspec.msgpack.Decoder(Result)


def encode_message(message: Message) -> bytes:
    """Return the bytes that `decode_message` reads, payload included."""
    return b"%b%c%b" % (_MESSAGE, message.schema, _ENCODE(message))


def decode_message(data: bytes) -> Message:
    """Read a message; raises InvalidRequest whose `details["reason"]` is not_ours, newer_schema or damaged."""
    return _decode(data, _MESSAGE, _MESSAGE_DECODER, "message")


def encode_result(result: Result) -> bytes:
    """Return the bytes that `decode_result` reads, payload included."""
    return b"%b%c%b" % (_RESULT, SCHEMA, _ENCODE(result))


def decode_result(data: bytes) -> Result:
    """Read a result; raises InvalidRequest as `decode_message` does."""
    return _decode(data, _RESULT, _RESULT_DECODER, "result")


def stored_result(id: str, data: bytes) -> Result:
    """Read a result that a store keeps; one that cannot be read is shown as our failure, and hides no other."""
    try:
        return decode_result(data)
    except InvalidRequest as error:
        record = ErrorRecord(code="internal", message="The stored result cannot be read", details=error.details)
        return Result(id=id, model="", model_version="", accepted_at_ms=0, finished_at_ms=0, attempts=0, error=record)


def _decode(data: bytes, letters: bytes, decoder: msgspec.msgpack.Decoder[_Record], what: str) -> _Record:
    if data[:3] != letters or len(data) <= _HEAD:
        raise InvalidRequest(f"these bytes are no {what} of Headrace", details={"reason": "not_ours"})
    schema = data[3]
    if schema > SCHEMA:
        raise InvalidRequest(
            f"this {what} has schema {schema}; this version of Headrace reads up to {SCHEMA}",
            details={"reason": "newer_schema", "expected": SCHEMA, "actual": schema},
        )
    try:
        record = decoder.decode(memoryview(data)[_HEAD:])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"this {what} is truncated or damaged: {error}", details={"reason": "damaged"}) from error
    if not 0 <= record.header_length <= len(record.payload):
        raise InvalidRequest(
            f"this {what} is damaged: its JSON part is said to be longer than its payload",
            details={"reason": "damaged", "expected": record.header_length, "actual": len(record.payload)},
        )
    return record
