"""The document is valid AsyncAPI 3.0, and it says what is really written."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest

from headrace.export.asyncapi import asyncapi_document
from headrace.message import (
    ErrorRecord,
    Message,
    Result,
    dead_letter_headers,
    message_headers,
    result_data,
    result_headers,
)
from headrace.tensor import (
    InferAnswer,
    InferRequest,
    RequestedOutput,
    Tensor,
    encode_answer,
    encode_request,
)

#: The project's own JSON Schema; see the licence note beside it.
SCHEMA = Path(__file__).parents[1] / "data" / "asyncapi-3.0.0.json"

INPUTS = {"x": Tensor.of(np.float32([[1, 2]])), "text": Tensor.of(["a"])}
PAYLOAD, HEADER_LENGTH = encode_request(
    InferRequest(id="c-1", inputs=INPUTS, outputs=(RequestedOutput("y", True),), parameters={"a": 1})
)
ANSWER, ANSWER_LENGTH = encode_answer(InferAnswer(model="m", version="1", id="c-1", outputs=INPUTS), binary=True)
BARE = Message(id="a", model="m", signature="s", accepted_at_ms=0, header_length=HEADER_LENGTH, payload=PAYLOAD)
FULL = msgspec.structs.replace(
    BARE,
    version="1",
    expires_at_ms=1,
    destinations=("https://example.com/hook",),
    request_id="r",
    client_id="c-1",
    traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    tracestate="a=1",
    fingerprint="f",
    replay_of="b",
)
DONE = Result(
    id="a",
    model="m",
    model_version="1",
    accepted_at_ms=0,
    finished_at_ms=1,
    attempts=1,
    request_id="r",
    client_id="c-1",
    traceparent=FULL.traceparent,
    header_length=ANSWER_LENGTH or 0,
    payload=ANSWER,
)
ERROR = ErrorRecord(code="model_failed", message="it broke", details={"file": "model.onnx"})
FAILED = msgspec.structs.replace(DONE, model_version="", error=ERROR, header_length=0, payload=b"")
DEAD = {"error": ERROR, "attempts": 3, "dead_at_ms": 2}


@cache
def validator() -> jsonschema.Draft7Validator:
    return jsonschema.Draft7Validator(json.loads(SCHEMA.read_text()))


def faults(document: Any) -> list[str]:
    return [error.message for error in validator().iter_errors(document)]


@pytest.mark.parametrize("prefix", ["ce-", "ce_"])
def test_the_document_is_valid_asyncapi(prefix: str) -> None:
    document = asyncapi_document(prefix=prefix)
    assert faults(document) == []
    # As it is printed, not only as it is in memory.
    assert json.loads(json.dumps(document)) == document


@pytest.mark.parametrize(
    "break_it",
    [
        lambda d: d.pop("info"),
        lambda d: d["channels"]["requests"].update(adress="x"),
        lambda d: d["operations"]["publishRequest"].update(action="publish"),
        lambda d: d["components"]["messages"]["request"].update(headers={"type": "strin"}),
        lambda d: d["components"]["messages"]["request"].update(correlationId={"location": "id"}),
    ],
)
def test_the_check_would_find_a_fault(break_it: Any) -> None:
    document = copy.deepcopy(asyncapi_document())
    break_it(document)
    assert faults(document)


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def test_every_reference_leads_somewhere() -> None:
    document = asyncapi_document()
    found = set(references(document))
    assert len(found) > 10
    for reference in found:
        at = document
        for part in reference.removeprefix("#/").split("/"):
            at = at[part]


def test_every_message_is_on_a_topic_and_every_topic_is_used() -> None:
    document = asyncapi_document()
    carried = {name for channel in document["channels"].values() for name in channel["messages"]}
    assert carried == set(document["components"]["messages"])
    used = {operation["channel"]["$ref"] for operation in document["operations"].values()}
    assert used == {f"#/channels/{name}" for name in document["channels"]}


def check(document: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    whole = {**schema, "components": document["components"]}
    jsonschema.Draft7Validator(whole, format_checker=jsonschema.Draft7Validator.FORMAT_CHECKER).validate(value)


@pytest.mark.parametrize("prefix", ["ce-", "ce_"])
@pytest.mark.parametrize(
    ("name", "headers", "complete"),
    [
        ("request", message_headers(FULL), True),
        ("request", message_headers(BARE), False),
        ("succeeded", result_headers(DONE), True),
        ("failed", result_headers(FAILED), False),
        ("deadLetter", dead_letter_headers(FULL, **DEAD), True),
        ("deadLetter", dead_letter_headers(BARE, **DEAD), False),
    ],
)
def test_the_headers_are_those_really_written(prefix: str, name: str, headers: dict[str, str], complete: bool) -> None:
    document = asyncapi_document(prefix=prefix)
    message = document["components"]["messages"][name]
    written = {prefix + key: value for key, value in headers.items()}
    written["content-type"] = written.pop(f"{prefix}datacontenttype")
    check(document, message["headers"], written)
    if complete:
        assert set(written) == set(message["headers"]["properties"])
    for needed in message["headers"]["required"]:
        with pytest.raises(jsonschema.ValidationError):
            check(document, message["headers"], {k: v for k, v in written.items() if k != needed})


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("request", PAYLOAD[:HEADER_LENGTH]),
        ("deadLetter", PAYLOAD[:HEADER_LENGTH]),
        ("succeeded", ANSWER[:ANSWER_LENGTH]),
    ],
)
def test_the_json_part_of_a_payload_is_as_described(name: str, head: bytes) -> None:
    document = asyncapi_document()
    schema = document["components"]["messages"][name]["x-json-part"]
    check(document, schema, json.loads(head))
    with pytest.raises(jsonschema.ValidationError):
        check(document, schema, {})


def test_the_payload_of_a_failed_result_is_as_described() -> None:
    document = asyncapi_document()
    schema = document["components"]["messages"]["failed"]["payload"]
    check(document, schema, json.loads(result_data(FAILED)))
    with pytest.raises(jsonschema.ValidationError):
        check(document, schema, {"code": "no_such_code", "message": ""})
