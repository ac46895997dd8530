"""The topics as an AsyncAPI 3.0 document: requests, results and dead letters, with their CloudEvents headers."""

from __future__ import annotations

from typing import Any

from headrace import __version__
from headrace.errors import BY_CODE
from headrace.message import SCHEMA
from headrace.tensor import ID_LENGTH_MAX, Datatype

__all__ = ["asyncapi_document"]

_TEXT = {"type": "string", "minLength": 1}
_TIME = {"type": "string", "format": "date-time"}
_WHOLE = {"type": "string", "pattern": "^[0-9]+$"}
_TRACEPARENT = {"type": "string", "pattern": "^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}"}

#: (attribute, required, schema, what it says). The tests hold these against headers really written.
_Rows = list[tuple[str, bool, dict[str, Any], str]]

_COMMON: _Rows = [
    ("specversion", True, {"const": "1.0"}, "The version of CloudEvents."),
    ("id", True, _TEXT, "The message's id; its result has the same."),
    ("subject", True, _TEXT, "The model's name."),
    ("modelversion", False, _TEXT, "On a request the version asked for; on a result the one that answered."),
    ("requestid", False, _TEXT, "For correlation in logs; never identity."),
    ("clientid", False, {**_TEXT, "maxLength": ID_LENGTH_MAX}, "The `id` that the caller gave."),
    ("traceparent", False, _TRACEPARENT, "The trace in which the message was accepted (W3C Trace Context)."),
    ("headerlength", True, _WHOLE, "How many bytes of the payload are its JSON part."),
]

_REQUEST: _Rows = [
    ("signature", True, _TEXT, "Digest of the signature that the payload was checked against."),
    ("expirytime", False, _TIME, "Not started by then, the message is answered `deadline_exceeded`."),
    ("destinations", False, _TEXT, "A JSON list of URLs that the result is sent to."),
    ("fingerprint", False, _TEXT, "Digest of what was asked; only with an idempotency key."),
    ("replayof", False, _TEXT, "The id of the dead letter that this is a replay of."),
    ("tracestate", False, {"type": "string", "maxLength": 512}, "Goes with `traceparent`."),
]


def asyncapi_document(*, prefix: str = "ce-") -> dict[str, Any]:
    """Return the document; `prefix` stands before each attribute: `ce-` on NATS and HTTP, `ce_` on Kafka."""
    messages = {
        "request": _message(
            "Request",
            "One request for a prediction, accepted and checked. Handed out at least once.",
            _headers(prefix, "message", "/headrace/requests", "The time of acceptance.", [*_COMMON, *_REQUEST]),
            "The Open Inference Protocol request in binary form.",
            "requestHead",
        ),
        "succeeded": _message(
            "Succeeded result",
            "The answer to a message. Exactly one result is visible for each message.",
            _headers(prefix, "result", "/headrace/results", "When it was finished.", _result_rows("succeeded")),
            "The Open Inference Protocol answer in binary form.",
            "answerHead",
        ),
        "failed": _failed(prefix),
        "deadLetter": _message(
            "Dead letter",
            "A message that was given up on, with the reason; its result says `failed`.",
            _headers(prefix, "deadletter", "/headrace/dead", "When it was given up on.", _dead_rows()),
            "The request as it was accepted.",
            "requestHead",
        ),
    }
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Headrace topics",
            "version": __version__,
            "description": (
                "Messages in CloudEvents 1.0.2 binary mode. They are handed out at least once; the consumer "
                "drops what has a result already, so that a message has exactly one. No order is promised."
            ),
            "license": {"name": "Apache-2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"},
        },
        "defaultContentType": "application/octet-stream",
        "channels": _channels(),
        "operations": _operations(),
        "components": {
            "messages": messages,
            "correlationIds": {
                "messageId": {
                    "description": "A result and a dead letter carry the id of their message.",
                    "location": f"$message.header#/{prefix}id",
                }
            },
            "schemas": _schemas(),
        },
    }


def _channels() -> dict[str, Any]:
    model = {"model": {"description": "The model's name; each model has its own topics."}}

    def channel(address: str, description: str, *names: str) -> dict[str, Any]:
        return {
            "address": f"headrace.{address}.{{model}}",
            "description": description,
            "parameters": model,
            "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in names},
        }

    return {
        "requests": channel("requests", "The durable line of accepted messages.", "request"),
        "results": channel("results", "What came of each message.", "succeeded", "failed"),
        "deadLetters": channel("dead", "Messages that were given up on.", "deadLetter"),
    }


def _operations() -> dict[str, Any]:
    def operation(action: str, channel: str, summary: str) -> dict[str, Any]:
        return {"action": action, "channel": {"$ref": f"#/channels/{channel}"}, "summary": summary}

    return {
        "publishRequest": operation("send", "requests", "Ingest makes a message durable, then answers 202."),
        "claimRequest": operation("receive", "requests", "Inference takes hold of a message for a while."),
        "publishResult": operation("send", "results", "Delivery sends a committed result."),
        "publishDeadLetter": operation("send", "deadLetters", "A message is given up on, for good or replay."),
    }


def _result_rows(status: str) -> _Rows:
    return [
        *_COMMON,
        ("status", True, {"const": status}, "What came of the message."),
        ("acceptedtime", True, _TIME, "When the message was accepted."),
        ("attempts", True, _WHOLE, "How often the message was handed out, the last time included."),
    ]


def _dead_rows() -> _Rows:
    codes = {"type": "string", "enum": sorted(BY_CODE)}
    return [
        *_COMMON,
        *_REQUEST,
        ("acceptedtime", True, _TIME, "When the message was accepted."),
        ("attempts", True, _WHOLE, "How often it was handed out."),
        ("reasoncode", True, codes, "Why it was given up on, as an error code."),
        ("reason", True, _TEXT, "Why, for people."),
    ]


def _headers(prefix: str, kind: str, source: str, time: str, rows: _Rows, media: str = "") -> dict[str, Any]:
    rows = [
        *rows,
        ("source", True, {"const": source}, "With `id` it names one occurrence."),
        ("type", True, {"const": f"headrace.{kind}.v{SCHEMA}"}, "Kind and schema; a newer one is refused."),
        ("time", True, _TIME, time),
    ]
    properties = {f"{prefix}{name}": {**schema, "description": says} for name, _, schema, says in rows}
    properties["content-type"] = {
        "const": media or "application/octet-stream",
        "description": "The media type of the payload (`datacontenttype`).",
    }
    required = [*(f"{prefix}{name}" for name, needed, _, _ in rows if needed), "content-type"]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _message(title: str, summary: str, headers: dict[str, Any], payload: str, head: str) -> dict[str, Any]:
    layout = (
        f"{payload} Its first `headerlength` bytes are the JSON object `#/components/schemas/{head}`, maybe "
        "padded with spaces; then follow the bytes of each tensor, little-endian and row-major, in the order "
        "of the JSON. An element of BYTES follows its length as 32 bits."
    )
    return {
        "name": title.replace(" ", ""),
        "title": title,
        "summary": summary,
        "contentType": "application/octet-stream",
        "correlationId": {"$ref": "#/components/correlationIds/messageId"},
        "headers": headers,
        "payload": {"type": "string", "format": "binary", "description": layout},
        "x-json-part": {"$ref": f"#/components/schemas/{head}"},
    }


def _failed(prefix: str) -> dict[str, Any]:
    media = "application/json"
    rows = _result_rows("failed")
    return {
        "name": "FailedResult",
        "title": "Failed result",
        "summary": "The reason why a message has no answer.",
        "contentType": media,
        "correlationId": {"$ref": "#/components/correlationIds/messageId"},
        "headers": _headers(prefix, "result", "/headrace/results", "When it was finished.", rows, media),
        "payload": {"$ref": "#/components/schemas/error"},
    }


def _schemas() -> dict[str, Any]:
    tensor = {
        "type": "object",
        "required": ["name", "datatype", "shape", "parameters"],
        "properties": {
            "name": {"type": "string"},
            "datatype": {"enum": [str(datatype) for datatype in Datatype]},
            "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
            "parameters": {
                "type": "object",
                "required": ["binary_data_size"],
                "properties": {"binary_data_size": {"type": "integer", "minimum": 0}},
            },
        },
    }
    output = {
        "type": "object",
        "required": ["name"],
        "properties": {"name": {"type": "string"}, "parameters": {"type": "object"}},
    }
    tensors = {"type": "array", "items": {"$ref": "#/components/schemas/tensor"}}
    outputs = {"type": "array", "items": output, "description": "The outputs asked for; absent: all."}
    shared = {"id": {"type": "string", "maxLength": ID_LENGTH_MAX}, "parameters": {"type": "object"}}
    return {
        "tensor": tensor,
        "requestHead": {
            "type": "object",
            "required": ["inputs"],
            "properties": {**shared, "inputs": tensors, "outputs": outputs},
        },
        "answerHead": {
            "type": "object",
            "required": ["model_name", "outputs"],
            "properties": {
                **shared,
                "model_name": {"type": "string"},
                "model_version": {"type": "string"},
                "outputs": tensors,
            },
        },
        "error": {
            "type": "object",
            "required": ["code", "message"],
            "properties": {
                "code": {"enum": sorted(BY_CODE)},
                "message": {"type": "string"},
                "details": {"type": "object"},
            },
        },
    }
