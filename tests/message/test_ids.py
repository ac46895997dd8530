from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.message import check_id, id_time_ms, keyed_id, new_id

SECRET, OTHER = b"s" * 32, b"o" * 32
NOW_MS = 1_800_000_000_000
ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"

TIMES = st.integers(0, 2**43 - 1)


@given(TIMES)
def test_an_id_tells_its_time_and_its_maker(now_ms: int) -> None:
    id = new_id(now_ms, SECRET)
    assert len(id) == 32
    assert set(id) <= set(ALPHABET)
    assert id[0] == "0"
    assert id_time_ms(id) == now_ms
    assert check_id(id, SECRET) == "ours"
    assert check_id(id, OTHER) is None


@given(TIMES, TIMES)
def test_ids_sort_by_time(one: int, other: int) -> None:
    if one != other:
        assert (new_id(one, SECRET) < new_id(other, SECRET)) is (one < other)


def test_ids_of_one_millisecond_are_all_different() -> None:
    assert len({new_id(NOW_MS, SECRET) for _ in range(2000)}) == 2000


@given(st.text(), st.text())
def test_a_key_has_one_id(key: str, tenant: str) -> None:
    id = keyed_id(key, SECRET, tenant)
    assert len(id) == 32
    assert set(id) <= set(ALPHABET)
    assert id[0] == "k"
    assert keyed_id(key, SECRET, tenant) == id
    assert keyed_id(key, OTHER, tenant) != id
    assert check_id(id, SECRET) == "keyed"
    assert check_id(id, OTHER) is None
    assert id_time_ms(id) is None


@given(st.text(), st.text(), st.text(), st.text())
def test_two_keys_or_two_tenants_never_share_an_id(key: str, tenant: str, key2: str, tenant2: str) -> None:
    if (key, tenant) != (key2, tenant2):
        assert keyed_id(key, SECRET, tenant) != keyed_id(key2, SECRET, tenant2)


def test_a_tenant_and_a_key_do_not_run_together() -> None:
    assert keyed_id("bc", SECRET, "a") != keyed_id("c", SECRET, "ab")
    assert keyed_id("abc", SECRET) != keyed_id("", SECRET, "abc")


@pytest.mark.parametrize("made", [new_id(NOW_MS, SECRET), keyed_id("key", SECRET)], ids=["time", "keyed"])
def test_changing_any_character_makes_an_id_foreign(made: str) -> None:
    for place in range(len(made)):
        for character in ALPHABET:
            changed = made[:place] + character + made[place + 1 :]
            if changed != made:
                assert check_id(changed, SECRET) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "k",
        "x" * 31,
        "0" * 32,
        "k" + "0" * 31,
        new_id(NOW_MS, SECRET).upper(),
        new_id(NOW_MS, SECRET) + "0",
        new_id(NOW_MS, SECRET) + "\n",
        " " + new_id(NOW_MS, SECRET)[1:],
        "0" * 31 + "i",
        "\u0660" * 32,
        "a/../../b",
        "0" * 100_000,
    ],
    ids=lambda text: repr(text[:8]),
)
def test_foreign_text_is_no_id(text: str) -> None:
    assert check_id(text, SECRET) is None


@given(st.text(ALPHABET, min_size=32, max_size=32))
def test_a_guessed_id_is_foreign(text: str) -> None:
    assert check_id(text, SECRET) is None
    assert text[0] == "k" or id_time_ms(text) is not None


def test_ids_are_made_the_same_way_for_good() -> None:
    # Keys that were accepted by an older version must keep their ids.
    assert keyed_id("order-1", SECRET, "shop") == "kv59qsqqxbraewbn3n7yjm2d0qj3pa05"
    assert check_id("06hhgq2g00hj5m9gphqxfwacftzw3sc6", SECRET) == "ours"
