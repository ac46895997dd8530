from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InvalidRequest, UnsupportedMediaType
from headrace.web.headers import (
    KEY_LENGTH_MAX,
    check_media_type,
    legal_request_id,
    read_destinations,
    read_key,
    read_preferences,
    read_seconds,
)


@pytest.mark.parametrize(
    ("values", "respond_async", "patience_s"),
    [
        ([b"respond-async"], True, 0),
        ([b"Respond-Async"], True, 0),
        ([b"respond-async; a=1; b"], True, 0),
        ([b"wait=10"], False, 10),
        ([b"WAIT = 10"], False, 10),
        ([b'wait="10"'], False, 10),
        ([b"respond-async, wait=10"], True, 10),
        ([b"respond-async", b"wait=10"], True, 10),
        ([b"handling=lenient, wait=3"], False, 3),
        ([b'x="a, respond-async", wait=4'], False, 4),
        ([b"wait=5, wait=9"], False, 5),
        ([b"wait=0"], False, 0),
        ([b"wait=100000"], False, 300),
        ([b"wait=-1"], False, None),
        ([b"wait=1.5"], False, None),
        ([b"wait"], False, None),
        ([b"wait=\xb2"], False, None),
        ([b""], False, None),
        ([b",,;=,"], False, None),
        ([b"\xff\xfe, respond-async"], True, 0),
        ([b"return=minimal"], False, None),
    ],
)
def test_prefer_is_read_as_rfc_7240_says(values: list[bytes], respond_async: bool, patience_s: float | None) -> None:
    found = read_preferences(values, wait_s_max=300)
    assert found.respond_async is respond_async
    assert found.patience_s == patience_s


@given(st.lists(st.binary(max_size=300), max_size=4))
def test_no_prefer_is_an_error(values: list[bytes]) -> None:
    assert read_preferences(values, wait_s_max=300).patience_s in (None, *range(301))


def test_a_prefer_long_enough_to_be_slow_is_not_read() -> None:
    assert read_preferences([b'a;"x,' * 13_000 + b'", respond-async'], wait_s_max=300).patience_s is None


@pytest.mark.parametrize(
    ("value", "key"),
    [
        (b"8e03978e-40d5-43dd-bc93-6894a57f9324", "8e03978e-40d5-43dd-bc93-6894a57f9324"),
        (b'"8e03978e"', "8e03978e"),
        (b'"with space"', "with space"),
        (b'"a\\"b\\\\c"', 'a"b\\c'),
        (b"  trimmed  ", "trimmed"),
        (b"k" * KEY_LENGTH_MAX, "k" * KEY_LENGTH_MAX),
    ],
)
def test_a38_a_key_is_the_same_bare_and_quoted(value: bytes, key: str) -> None:
    assert read_key([value]) == key


@pytest.mark.parametrize(
    "values",
    [
        [b""],
        [b'""'],
        [b'"half'],
        [b'half"'],
        [b"two words"],
        [b"k" * (KEY_LENGTH_MAX + 1)],
        [b'"' + b"k" * (KEY_LENGTH_MAX + 1) + b'"'],
        [b"\xc3\xa9"],
        [b"a\x7f"],
        [b"one", b"two"],
    ],
)
def test_a_key_that_is_unclear_is_refused_and_not_repeated(values: list[bytes]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_key(values)
    assert caught.value.details["header"] == "Idempotency-Key"
    assert "kkkk" not in repr(caught.value.details)


def test_no_key_is_no_error() -> None:
    assert read_key([]) is None


@pytest.mark.parametrize(
    ("values", "urls"),
    [
        ([b"https://a/"], ("https://a/",)),
        ([b"https://a/, https://b/"], ("https://a/", "https://b/")),
        ([b"https://a/,https://b/"], ("https://a/", "https://b/")),
        ([b"https://a/", b"https://b/"], ("https://a/", "https://b/")),
        ([b"https://a/", b"https://a/"], ("https://a/",)),
        ([b"https://a/?x=1,2&y=3, topic:results"], ("https://a/?x=1,2&y=3", "topic:results")),
    ],
)
def test_webhook_urls_may_repeat_be_listed_and_hold_commas(values: list[bytes], urls: tuple[str, ...]) -> None:
    assert read_destinations(values) == urls


@pytest.mark.parametrize(
    "values",
    [[b""], [b"https://a/ b"], [b"https://a/\xff"], [b"h" * 3000], [b"https://h%d/" % n for n in range(17)]],
)
def test_webhook_urls_are_bounded(values: list[bytes]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_destinations(values)
    assert caught.value.details["header"] == "Webhook-URL"


@pytest.mark.parametrize("value", [b"a", b"A.b_c-9", b"x" * 128])
def test_a28_a_legal_id_is_kept(value: bytes) -> None:
    assert legal_request_id(value) == value.decode()


@pytest.mark.parametrize(
    "value",
    [None, b"", b"x" * 129, b"x" * 100_000, b"a b", b"a\nb", b"%0a", b"\x1b[31m", b'"', b"\xe2\x80\xa8", b"a\n"],
)
def test_a28_an_illegal_id_is_replaced(value: bytes | None) -> None:
    assert legal_request_id(value) is None


@pytest.mark.parametrize(("value", "seconds"), [(b"0", 0), (b"1.5", 1.5), (b"99999", 3600), (None, None)])
def test_seconds_are_read_and_clamped(value: bytes | None, seconds: float | None) -> None:
    assert read_seconds("wait", value, seconds_max=3600) == seconds


@pytest.mark.parametrize("value", [b"", b"-1", b"nan", b"inf", b"1e9", b"0x1", b"1,5", b"9" * 400])
def test_what_is_no_number_of_seconds_is_refused_by_name(value: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_seconds("wait", value, seconds_max=3600)
    assert caught.value.details["input"] == "wait"


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"application/json",
        b"Application/JSON; charset=UTF-8",
        b'application/json;charset="utf-8"',
        b"application/vnd.kserve+json",
    ],
)
def test_json_is_taken_whatever_it_is_called(value: bytes | None) -> None:
    check_media_type({} if value is None else {b"content-type": value}, binary=False)


def test_what_curl_calls_a_form_is_json_unless_a_browser_says_so() -> None:
    headers = {b"content-type": b"application/x-www-form-urlencoded"}
    check_media_type(headers, binary=False)
    with pytest.raises(UnsupportedMediaType):
        check_media_type({**headers, b"origin": b"https://somewhere.example"}, binary=False)


@pytest.mark.parametrize(
    "value",
    [
        b"multipart/form-data; boundary=x",
        b"application/x-www-form-urlencoded; charset=utf-8",
        b"text/plain",
        b"application/json; charset=latin-1",
        b"application/octet-stream",
        b"",
        b"\xff/\xff",
    ],
)
def test_other_media_types_are_refused(value: bytes) -> None:
    with pytest.raises(UnsupportedMediaType):
        check_media_type({b"content-type": value}, binary=False)


def test_bytes_are_taken_where_they_are_expected() -> None:
    check_media_type({b"content-type": b"application/octet-stream"}, binary=True)
