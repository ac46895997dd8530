from __future__ import annotations

import gzip
import random
import tracemalloc
import zlib
from typing import Any

import pytest

from headrace.errors import InvalidRequest, Overloaded, TooLarge, UnsupportedMediaType
from headrace.web.exchange import Bodies, ClientGone, Exchange, inflate
from headrace.web.settings import WebSettings

MiB = 1024 * 1024


def exchange(*pieces: bytes | None, limit: int = MiB, bodies: Bodies | None = None, **headers: str) -> Exchange:
    """A request whose body comes in pieces; None stands for a client that goes."""
    waiting = list(pieces)

    async def receive() -> dict[str, Any]:
        piece = waiting.pop(0)
        if piece is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": piece, "more_body": bool(waiting)}

    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"method": "POST", "headers": pairs, "query_string": b""}
    return Exchange(scope, receive, WebSettings(body_bytes_max=limit), bodies or Bodies(1 << 30), 0.0)


async def test_a_body_comes_whole_however_it_was_cut() -> None:
    assert await exchange(b"abc").body() == b"abc"
    assert await exchange(b"", b"a", b"", b"bc").body() == b"abc"
    assert await exchange(b"").body() == b""


async def test_a_declared_length_is_refused_before_anything_is_read() -> None:
    found = exchange(limit=1024, content_length="1025")
    with pytest.raises(TooLarge) as caught:
        await found.body()
    assert caught.value.details == {"input": "body", "limit": 1024, "size": 1025}
    assert found.body_is_unread


async def test_a_body_without_a_length_is_refused_once_it_is_too_long() -> None:
    found = exchange(b"x" * 600, b"x" * 600, b"x" * 600, limit=1024, transfer_encoding="chunked")
    with pytest.raises(TooLarge) as caught:
        await found.body()
    assert caught.value.details["size"] == 1200
    assert found.body_is_unread


async def test_a_body_of_exactly_the_limit_is_taken() -> None:
    assert len(await exchange(b"x" * 1024, limit=1024, content_length="1024").body()) == 1024


async def test_a11_a_client_that_goes_while_sending_is_no_parse_error() -> None:
    with pytest.raises(ClientGone):
        await exchange(b"abc", None).body()
    with pytest.raises(ClientGone):
        await exchange(None).body()


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", " x-gzip ", "deflate", "identity", ""])
async def test_a9_an_encoded_body_is_decoded(encoding: str) -> None:
    plain = b'{"data": [[1, 2, 3]]}' * 50
    packed = {"gzip": gzip.compress, "x-gzip": gzip.compress, "deflate": zlib.compress}
    body = packed.get(encoding.strip().lower(), bytes)(plain)
    found = exchange(body, content_encoding=encoding)
    assert await found.body() == plain
    assert found.input_size == len(plain)


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "gzip;q=1"])
async def test_a9_an_unknown_encoding_is_refused(encoding: str) -> None:
    with pytest.raises(UnsupportedMediaType) as caught:
        await exchange(b"x", content_encoding=encoding).body()
    assert "gzip" in caught.value.details["expected"]


@pytest.mark.parametrize("size", [10 * 1024, 200 * 1024])
async def test_a9_a_bomb_is_refused_and_memory_stays_flat(size: int) -> None:
    zeros = gzip.compress(b"\0" * (size * 1000), compresslevel=9)
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge) as caught:
            await exchange(zeros, content_encoding="gzip").body()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.details["limit"] == MiB
    assert peak < 6 * MiB


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda body: body[:-1],
        lambda body: body[:10],
        lambda body: b"",
        lambda body: b"plain text",
        lambda body: body[:-5] + bytes([body[-5] ^ 1]) + body[-4:],
        lambda body: body + b"left over",
    ],
)
def test_a9_a_damaged_encoding_is_refused(encoding: bytes, damage: Any) -> None:
    body = damage({b"gzip": gzip.compress, b"deflate": zlib.compress}[encoding](b"some text" * 100))
    with pytest.raises(InvalidRequest) as caught:
        inflate(body, encoding, MiB)
    assert encoding.decode() in caught.value.message


def test_a9_several_gzip_members_are_one_body_under_one_limit() -> None:
    assert inflate(gzip.compress(b"a") + gzip.compress(b"b"), b"gzip", 10) == b"ab"
    with pytest.raises(TooLarge):
        inflate(gzip.compress(b"a" * 8) * 2, b"gzip", 10)


def test_a9_what_was_packed_comes_out_whatever_its_size() -> None:
    source = random.Random(9)
    for size in (0, 1, 100, MiB - 1, MiB, MiB + 1, 3 * MiB):
        plain = source.randbytes(size // 2) + b"z" * (size - size // 2)
        assert inflate(gzip.compress(plain, 1), b"gzip", 4 * MiB) == plain
        assert inflate(zlib.compress(plain, 1), b"deflate", 4 * MiB) == plain
        assert inflate(gzip.compress(plain, 1), b"gzip", max(size, 1)) == plain


def test_every_value_of_a_repeated_header_is_found() -> None:
    found = exchange()
    found.scope["headers"] = [(b"prefer", b"a"), (b"x", b"y"), (b"prefer", b"b")]
    found.headers = dict(found.scope["headers"])
    assert found.every(b"prefer") == [b"a", b"b"]
    assert found.every(b"none") == []


@pytest.mark.parametrize("query", [b"a=%ff", b"a=\xff", b"&".join(b"a%d=1" % n for n in range(40))])
def test_a_query_that_cannot_be_read_is_refused(query: bytes) -> None:
    found = exchange()
    found.scope["query_string"] = query
    with pytest.raises(InvalidRequest):
        found.query()


async def test_long_bodies_together_take_no_more_than_their_limit() -> None:
    bodies = Bodies(250_000)
    half = b"x" * 50_000
    first, second = (exchange(half, half, bodies=bodies) for _ in range(2))
    await first.body()
    await second.body()
    assert bodies.held == 200_000
    third = exchange(half, half, bodies=bodies)
    with pytest.raises(Overloaded) as caught:
        await third.body()
    assert caught.value.retry_after_s is not None
    assert caught.value.details == {"held": 200_000 + third.held, "limit": 250_000}
    for each in (first, second, third):
        bodies.give_back(each.held, 4.0)
    assert bodies.held == 0
    await exchange(half, half, bodies=bodies).body()


async def test_short_bodies_are_not_counted_and_inflated_ones_are() -> None:
    bodies = Bodies(100_000)
    for _ in range(10):
        await exchange(b"x" * 20_000, b"y" * 20_000, bodies=bodies).body()
    assert bodies.held == 0
    found = exchange(gzip.compress(b"x" * 90_000), bodies=bodies, content_encoding="gzip")
    await found.body()
    assert (bodies.held, found.held) == (90_000, 90_000)
    with pytest.raises(Overloaded):
        await exchange(gzip.compress(b"x" * 90_000), bodies=bodies, content_encoding="gzip").body()
