"""CloudEvents attributes, checked against the SDK of the CloudEvents project."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import pytest
from cloudevents.core.bindings import http, kafka
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InvalidRequest
from headrace.message import (
    ErrorRecord,
    Message,
    Result,
    dead_letter_headers,
    message_from_headers,
    message_headers,
    result_data,
    result_from_headers,
    result_headers,
    sound_traceparent,
)
from message.records import BARE_MESSAGE, FAILED_RESULT, FULL_MESSAGE, FULL_RESULT, messages, results

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@given(messages())
def test_a_message_survives_its_headers(message: Message) -> None:
    assert message_from_headers(message_headers(message), message.payload) == message


@given(results())
def test_a_result_survives_its_headers(result: Result) -> None:
    assert result_from_headers(result_headers(result), result_data(result)) == result


@pytest.mark.parametrize("prefix", ["ce-", "ce_", "CE-", "Ce_"])
def test_the_prefix_and_case_of_a_binding_do_not_matter(prefix: str) -> None:
    headers = {prefix + name: value for name, value in message_headers(FULL_MESSAGE).items()}
    headers["Content-Type"] = headers.pop(prefix + "datacontenttype")
    assert message_from_headers(headers, FULL_MESSAGE.payload) == FULL_MESSAGE


EVENTS = [
    (message_headers(FULL_MESSAGE), FULL_MESSAGE.payload),
    (message_headers(BARE_MESSAGE), BARE_MESSAGE.payload),
    (result_headers(FULL_RESULT), result_data(FULL_RESULT)),
    (result_headers(FAILED_RESULT), result_data(FAILED_RESULT)),
    (
        dead_letter_headers(
            FULL_MESSAGE,
            error=ErrorRecord(code="model_failed", message="line one\nline two\x1b[31m"),
            attempts=3,
            dead_at_ms=1_800_000_009_000,
        ),
        FULL_MESSAGE.payload,
    ),
]
KINDS = ["message", "bare message", "result", "failed result", "dead letter"]


@pytest.mark.parametrize(("headers", "data"), EVENTS, ids=KINDS)
def test_the_sdk_reads_and_validates_what_we_write(headers: dict[str, str], data: bytes) -> None:
    rest = {name: value for name, value in headers.items() if name != "datacontenttype"}
    on_kafka = {f"ce_{name}": value.encode() for name, value in rest.items()}
    on_kafka["content-type"] = headers["datacontenttype"].encode()
    on_http = {f"ce-{name}": quote(value, safe=" !#$&'()*+,/:;=?@[]-._~") for name, value in rest.items()}
    on_http["content-type"] = headers["datacontenttype"]
    for found in (
        kafka.from_binary(kafka.KafkaMessage(on_kafka, None, data), JSONFormat(), CloudEvent),
        http.from_binary(http.HTTPMessage(on_http, data), JSONFormat(), CloudEvent),
    ):
        assert found.get_specversion() == "1.0"
        assert found.get_id() == headers["id"]
        assert found.get_source() == headers["source"]
        assert found.get_type() == headers["type"]
        assert found.get_subject() == headers["subject"]
        assert found.get_time() == datetime.fromisoformat(headers["time"])
        assert found.get_datacontenttype() == headers["datacontenttype"]
        for name in rest.keys() - {"specversion", "id", "source", "type", "subject", "time"}:
            assert found.get_extension(name) == headers[name]


@pytest.mark.parametrize(("headers", "data"), EVENTS, ids=KINDS)
def test_names_and_values_keep_the_rules_of_the_specification(headers: dict[str, str], data: bytes) -> None:
    for name, value in headers.items():
        assert re.fullmatch(r"[a-z0-9]{1,20}", name)
        assert value
        assert value.isprintable()
    assert headers["specversion"] == "1.0"


def test_a_message_and_its_result_are_two_occurrences_with_one_id() -> None:
    message, result, dead = EVENTS[0][0], EVENTS[2][0], EVENTS[4][0]
    assert message["id"] == result["id"] == dead["id"]
    assert len({message["source"], result["source"], dead["source"]}) == 3


def test_a_dead_letter_holds_its_message() -> None:
    headers = EVENTS[4][0]
    assert headers["reasoncode"] == "model_failed"
    assert headers["reason"] == "line one line two [31m"
    assert headers["time"] == "2027-01-15T08:00:09.000Z"
    own = {"source", "type", "time"}
    assert {k: v for k, v in headers.items() if k not in own}.items() >= {
        k: v for k, v in message_headers(FULL_MESSAGE).items() if k not in own
    }.items()


def test_data_is_never_empty_where_a_compacted_topic_would_take_it_for_a_deletion() -> None:
    assert result_data(FAILED_RESULT) == (
        b'{"code":"model_failed","message":"it broke","details":{"file":"model.onnx"}}'
    )


def test_times_are_utc_with_milliseconds() -> None:
    assert message_headers(FULL_MESSAGE)["time"] == "2027-01-15T08:00:00.001Z"
    shifted = message_headers(FULL_MESSAGE) | {"time": "2027-01-15T09:00:00.001+01:00"}
    assert message_from_headers(shifted, FULL_MESSAGE.payload).accepted_at_ms == 1_800_000_000_001
    assert datetime(2027, 1, 15, 8, tzinfo=UTC).timestamp() * 1000 == 1_800_000_000_000


@pytest.mark.parametrize(
    ("change", "reason", "attribute"),
    [
        ({"id": None}, "not_ours", "id"),
        ({"specversion": None}, "not_ours", "specversion"),
        ({"specversion": "0.3"}, "damaged", "specversion"),
        ({"type": "com.example.thing"}, "not_ours", None),
        ({"type": "headrace.result.v1"}, "not_ours", None),
        ({"type": "headrace.message.v"}, "not_ours", None),
        ({"type": "headrace.message.vx"}, "not_ours", None),
        ({"type": "headrace.message.v2"}, "newer_schema", None),
        ({"type": "headrace.message.v" + "9" * 5000}, "not_ours", None),
        ({"time": "yesterday"}, "damaged", "time"),
        ({"time": "2027-01-15T08:00:00"}, "damaged", "time"),
        ({"expirytime": ""}, "damaged", "expirytime"),
        ({"headerlength": "5"}, "damaged", "headerlength"),
        ({"headerlength": "-1"}, "damaged", "headerlength"),
        ({"headerlength": "\u0662"}, "damaged", "headerlength"),
        ({"headerlength": None}, "not_ours", "headerlength"),
        ({"destinations": "https://a"}, "damaged", "destinations"),
        ({"destinations": "[1]"}, "damaged", "destinations"),
        ({"destinations": "[" * 100_000}, "damaged", "destinations"),
        ({"signature": None}, "not_ours", "signature"),
        ({"subject": None}, "not_ours", "subject"),
    ],
)
def test_bad_headers_are_refused_by_name(change: dict[str, Any], reason: str, attribute: str | None) -> None:
    headers = {k: v for k, v in (message_headers(FULL_MESSAGE) | change).items() if v is not None}
    with pytest.raises(InvalidRequest) as caught:
        message_from_headers(headers, FULL_MESSAGE.payload)
    assert caught.value.details["reason"] == reason
    assert caught.value.details.get("attribute") == attribute
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("change", "data"),
    [
        ({"status": "maybe"}, b"{}"),
        ({"status": "failed"}, b"{}"),
        ({"status": "failed"}, b"\xff"),
        ({"attempts": "two"}, b"{}"),
        ({"type": "headrace.result.v2"}, b"{}"),
    ],
)
def test_a_bad_result_is_refused(change: dict[str, str], data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        result_from_headers(result_headers(FULL_RESULT) | change, data)


@given(st.dictionaries(st.sampled_from(sorted(message_headers(FULL_MESSAGE))), st.text(max_size=8)))
def test_no_headers_do_more_than_raise_a_typed_error(change: dict[str, str]) -> None:
    try:
        message_from_headers(message_headers(FULL_MESSAGE) | change, b"{}")
    except InvalidRequest:
        pass


@pytest.mark.parametrize("text", [TRACE, "cc" + TRACE[2:] + "-what-comes-later", TRACE[:-2] + "00"])
def test_a_sound_trace_is_kept(text: str) -> None:
    assert sound_traceparent(text) == text


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "garbage",
        TRACE.upper(),
        TRACE + "-00",
        TRACE + "\n",
        " " + TRACE,
        "ff" + TRACE[2:],
        TRACE.replace("4bf92f3577b34da6a3ce929d0e0e4736", "0" * 32),
        TRACE.replace("00f067aa0ba902b7", "0" * 16),
        "cc" + TRACE[2:] + "-" + "x" * 10_000,
        "cc" + TRACE[2:] + "-\r\nforged: 1",
        "cc" + TRACE[2:] + "-\rforged: 1",
    ],
)
def test_a_malformed_trace_is_left_out_not_an_error(text: str | None) -> None:
    assert sound_traceparent(text) is None
    headers = message_headers(FULL_MESSAGE) | ({} if text is None else {"traceparent": text})
    if text is not None:
        again = message_from_headers(headers, FULL_MESSAGE.payload)
        assert (again.traceparent, again.tracestate) == (None, None)


def test_a_malformed_trace_is_not_written() -> None:
    message = Message(
        id="a",
        model="m",
        signature="s",
        accepted_at_ms=0,
        traceparent="x",
        tracestate="a=1",
        header_length=0,
        payload=b"",
    )
    assert not {"traceparent", "tracestate"} & message_headers(message).keys()
