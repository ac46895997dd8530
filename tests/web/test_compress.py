from __future__ import annotations

import gzip
import json
import random
import zlib

import pytest

from headrace.web.compress import COMPRESS_BYTES_MIN, pick_encoding
from web.kit import Reply, world

ROWS = [[1, 2, 3]] * 2000
_TENSOR = {"name": "x", "shape": [4096, 3], "datatype": "FP32", "parameters": {"binary_data_size": 49152}}
HEAD = json.dumps({"inputs": [_TENSOR], "parameters": {"binary_data_output": True}}).encode()


async def predict(accepted: str | None, rows: list[list[float]] = ROWS) -> Reply:
    return await world().predict(rows, {} if accepted is None else {"accept-encoding": accepted})


@pytest.mark.parametrize(
    ("accepted", "picked"),
    [
        (b"gzip", b"gzip"),
        (b"deflate", b"deflate"),
        (b"gzip, deflate, br", b"gzip"),
        (b"deflate;q=1, gzip;q=0.5", b"deflate"),
        (b"gzip;q=0, *", b"deflate"),
        (b"*", b"gzip"),
        (b"*;q=0", None),
        (b"br", None),
        (b"identity", None),
        (b"gzip;q=0", None),
        (b"gzip;q=nan", None),
        (b"gzip;q=x", None),
        (b"", None),
        (b",;,=;", None),
        (b"GZIP ; q=1.0", b"gzip"),
    ],
)
def test_what_is_accepted_is_picked(accepted: bytes, picked: bytes | None) -> None:
    assert pick_encoding(accepted) == picked


@pytest.mark.parametrize(("name", "undo"), [("gzip", gzip.decompress), ("deflate", zlib.decompress)])
@pytest.mark.parametrize("repeat", [1, 20])
async def test_a_long_answer_is_compressed_for_who_accepts_it(name: str, undo: object, repeat: int) -> None:
    reply = await predict(name, ROWS * repeat)
    assert reply.headers["content-encoding"] == name
    assert reply.headers["vary"] == "accept-encoding"
    assert int(reply.headers["content-length"]) == len(reply.body)
    assert json.loads(undo(reply.body))["prediction"] == ROWS * repeat  # type: ignore[operator]


async def test_others_get_it_as_it_is_and_are_told_that_it_varies() -> None:
    for accepted in (None, "br", "gzip;q=0"):
        reply = await predict(accepted)
        assert "content-encoding" not in reply.headers
        assert reply.headers["vary"] == "accept-encoding"
        assert reply.json()["prediction"] == ROWS


async def test_a_short_answer_is_not_worth_it() -> None:
    reply = await predict("gzip", [[1, 2, 3]])
    assert len(reply.body) < COMPRESS_BYTES_MIN
    assert "content-encoding" not in reply.headers


async def test_binary_outputs_that_do_not_shrink_are_left_alone() -> None:
    noise = random.Random(1).randbytes(12 * 4096)
    headers = {"inference-header-content-length": str(len(HEAD)), "accept-encoding": "gzip"}
    reply = await world().ask("POST", "/v2/models/echo/infer", HEAD + noise, headers)
    assert "content-encoding" not in reply.headers
    assert reply.body.endswith(noise)


async def test_the_length_of_the_json_part_is_that_before_compression() -> None:
    headers = {"inference-header-content-length": str(len(HEAD)), "accept-encoding": "gzip"}
    reply = await world().ask("POST", "/v2/models/echo/infer", HEAD + bytes(49152), headers)
    body = gzip.decompress(reply.body)
    length = int(reply.headers["inference-header-content-length"])
    assert json.loads(body[:length])["model_name"] == "echo"
    assert body[length:] == bytes(49152)
