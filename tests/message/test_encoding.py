from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InvalidRequest
from headrace.message import (
    SCHEMA,
    Message,
    Result,
    decode_message,
    decode_result,
    encode_message,
    encode_result,
)
from message.records import FAILED_RESULT, FULL_MESSAGE, messages, results


@given(messages())
def test_a_message_survives_its_bytes(message: Message) -> None:
    assert decode_message(encode_message(message)) == message


@given(results())
def test_a_result_survives_its_bytes(result: Result) -> None:
    again = decode_result(encode_result(result))
    assert again == result
    assert again.succeeded is (result.error is None)


def reason(read: Callable[[bytes], Any], data: bytes) -> Any:
    with pytest.raises(InvalidRequest) as caught:
        read(data)
    return caught.value.details["reason"]


@pytest.mark.parametrize(
    ("data", "read"),
    [(encode_message(FULL_MESSAGE), decode_message), (encode_result(FAILED_RESULT), decode_result)],
    ids=["message", "result"],
)
def test_every_truncation_is_told(data: bytes, read: Callable[[bytes], Any]) -> None:
    for length in range(len(data)):
        assert reason(read, data[:length]) == ("not_ours" if length <= 4 else "damaged")
    assert reason(read, data + b"\0") == "damaged"


def test_a_newer_schema_is_refused_with_both_numbers() -> None:
    data = bytearray(encode_message(FULL_MESSAGE))
    data[3] = SCHEMA + 1
    with pytest.raises(InvalidRequest) as caught:
        decode_message(bytes(data))
    assert caught.value.details == {"reason": "newer_schema", "expected": SCHEMA, "actual": SCHEMA + 1}
    assert f"schema {SCHEMA + 1}" in caught.value.message


def test_a_message_is_not_a_result_and_neither_is_anything_else() -> None:
    assert reason(decode_result, encode_message(FULL_MESSAGE)) == "not_ours"
    assert reason(decode_message, encode_result(FAILED_RESULT)) == "not_ours"
    assert reason(decode_message, b'{"id": "a"}') == "not_ours"


@given(st.binary(max_size=60))
def test_any_bytes_behind_our_letters_do_no_more_than_raise(data: bytes) -> None:
    assert reason(decode_message, b"HRM\x01" + data) in ("damaged", "not_ours")


def test_a_nesting_bomb_is_damage() -> None:
    bomb = b"\x81\xa7details" + b"\x91" * 200_000
    assert reason(decode_message, b"HRM\x01" + bomb) == "damaged"


def test_a_field_that_this_version_does_not_know_is_skipped() -> None:
    fields = msgspec.to_builtins(FULL_MESSAGE, builtin_types=(bytes,)) | {"later": [1, 2]}
    assert decode_message(b"HRM\x01" + msgspec.msgpack.encode(fields)) == FULL_MESSAGE


@pytest.mark.parametrize("header_length", [-1, len(FULL_MESSAGE.payload) + 1])
def test_a_header_longer_than_its_payload_is_damage(header_length: int) -> None:
    wrong = msgspec.structs.replace(FULL_MESSAGE, header_length=header_length)
    assert reason(decode_message, encode_message(wrong)) == "damaged"


def test_the_bytes_of_schema_1_can_be_read_for_good() -> None:
    # Written by the first version; topics may hold such messages when a newer one starts.
    old = b"HRM\x01\x85\xa2id\xa1a\xa5model\xa1m\xa9signature\xa1s\xaeaccepted_at_ms\x05\xadheader_length\x02"
    old = old.replace(b"\x85", b"\x86", 1) + b"\xa7payload\xc4\x02{}"
    assert decode_message(old) == Message(
        id="a", model="m", signature="s", accepted_at_ms=5, header_length=2, payload=b"{}"
    )
