"""Ids that tell the truth: a message's id says when it was made and that it was we who made it."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from typing import Literal

__all__ = ["check_id", "id_time_ms", "keyed_id", "new_id"]

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_PAIRS = [a + b for a in _ALPHABET for b in _ALPHABET]
_ID = re.compile(r"[0-9a-hjkmnp-tv-z]{32}", re.ASCII)
_TIME_BITS, _RANDOM_BITS, _CHECK_BITS = 48, 64, 48
#: A keyed id: "k", 21 characters of hash, 10 of check.
_KEYED_BODY, _KEYED_CHECK = 22, 10


def new_id(now_ms: int, secret: bytes) -> str:
    """Return an id for a message without a key: 32 characters that sort by time.

    48 bits of milliseconds, 64 random bits and a 48-bit check that only `secret` can make: an id that we never
    gave is told from one that is still pending without asking anybody. Starts with "0" until the year 2248.
    """
    stem = (now_ms << _RANDOM_BITS) | secrets.randbits(_RANDOM_BITS)
    return _base32((stem << _CHECK_BITS) | _check(stem, secret), 32)


def keyed_id(key: str, secret: bytes, tenant: str = "") -> str:
    """Return the one id of an idempotency key (per tenant): 32 characters that start with "k"."""
    # Lengths first, so that no two (tenant, key) pairs are hashed from the same bytes.
    owner = tenant.encode("utf-8", "surrogatepass")
    said = len(owner).to_bytes(4, "big") + owner + key.encode("utf-8", "surrogatepass")
    hashed = hashlib.blake2s(said, key=secret, person=b"key", digest_size=16).digest()
    body = "k" + _base32(int.from_bytes(hashed) >> (128 - 5 * (_KEYED_BODY - 1)), _KEYED_BODY - 1)
    return body + _keyed_check(body, secret)


def check_id(id: str, secret: bytes) -> Literal["ours", "keyed"] | None:
    """Return "ours" for an id that `new_id` gave, "keyed" for one of `keyed_id`, None for any other text."""
    if _ID.fullmatch(id) is None:
        return None
    if id[0] == "k":
        good = hmac.compare_digest(_keyed_check(id[:_KEYED_BODY], secret), id[_KEYED_BODY:])
        return "keyed" if good else None
    value = _unbase32(id)
    return "ours" if _check(value >> _CHECK_BITS, secret) == value & ((1 << _CHECK_BITS) - 1) else None


def id_time_ms(id: str) -> int | None:
    """Return when an id of `new_id` was made; None for a keyed or foreign id."""
    if _ID.fullmatch(id) is None or id[0] == "k":
        return None
    return _unbase32(id) >> (_RANDOM_BITS + _CHECK_BITS)


def _check(stem: int, secret: bytes) -> int:
    said = stem.to_bytes((_TIME_BITS + _RANDOM_BITS) // 8)
    return int.from_bytes(hashlib.blake2s(said, key=secret, person=b"id", digest_size=_CHECK_BITS // 8).digest())


def _keyed_check(body: str, secret: bytes) -> str:
    hashed = hashlib.blake2s(body.encode(), key=secret, person=b"keycheck", digest_size=8).digest()
    return _base32(int.from_bytes(hashed) >> (64 - 5 * _KEYED_CHECK), _KEYED_CHECK)


def _base32(value: int, length: int) -> str:
    """Write Crockford's base32, two characters at a time."""
    odd = length & 1
    head = _ALPHABET[value >> (5 * (length - 1))] if odd else ""
    shifts = range(5 * (length - odd) - 10, -1, -10)
    return head + "".join([_PAIRS[(value >> shift) & 1023] for shift in shifts])


def _unbase32(text: str) -> int:
    value = 0
    for character in text:
        value = (value << 5) | _ALPHABET.index(character)
    return value
