from __future__ import annotations

import pytest

from headrace.tensor import Datatype
from web.kit import FakeDoor, Reply, World, signature, state, world

FORM = b'--b0\r\nContent-Disposition: form-data; name="%b"; filename="a"\r\n\r\n%b\r\n--b0--\r\n'
FORM_TYPE = "multipart/form-data; boundary=b0"


def text() -> World:
    return world(FakeDoor(state(signature=signature(Datatype.BYTES, (-1,)))))


async def send(here: World, body: bytes, kind: str | None = None, method: str = "POST") -> Reply:
    return await here.ask(method, "/predictions/echo", body, {} if kind is None else {"content-type": kind})


@pytest.mark.parametrize("method", ["POST", "PUT"])
@pytest.mark.parametrize("body", [b"[[1,2,3]]", b'{"data":[[1,2,3]]}', b" [[1,2,3]]"])
async def test_json_bare_or_under_data(body: bytes, method: str) -> None:
    for kind in (None, "application/json"):
        reply = await send(world(), body, kind, method)
        assert (reply.status, reply.json()) == (200, [[1, 2, 3]])


async def test_bytes_are_the_only_input() -> None:
    reply = await send(world(), bytes.fromhex("0000803f0000004000004040"), "application/octet-stream")
    assert reply.json() == [[1, 2, 3]]
    assert (await send(text(), b"[not json", "image/png")).json() == ["[not json"]
    assert (await send(text(), b"{}")).json() == ["{}"], "the model takes bytes; nothing said that these are JSON"


@pytest.mark.parametrize("name", [b"data", b"body"])
async def test_a_form_has_a_field_data(name: bytes) -> None:
    assert (await send(text(), FORM % (name, b"a\r\n-- b"), FORM_TYPE)).json() == ["a\r\n-- b"]
    assert (await send(world(), FORM % (name, b"[[1,2,3]]"), FORM_TYPE)).json() == [[1, 2, 3]]


@pytest.mark.parametrize("body", [b"", FORM % (b"other", b"x"), b"--b0\r\n\r\n--b0--", b"x" * 100])
async def test_a_form_without_it_is_refused(body: bytes) -> None:
    for kind in (FORM_TYPE, "multipart/form-data"):
        reply = await send(text(), body, kind)
        assert (reply.status, reply.json()["code"]) == (400, "invalid_request")


async def test_versions_and_errors() -> None:
    here = world(FakeDoor(state("echo", "1"), state("echo", "2")))
    reply = await here.ask("POST", "/predictions/echo/1", b"[[1,2,3]]")
    assert reply.headers["x-model-version"] == "1"
    assert (await here.ask("POST", "/predictions/echo/3", b"[[1,2,3]]")).json()["code"] == "version_not_found"
    assert (await here.ask("POST", "/predictions/none", b"[[1,2,3]]")).json()["code"] == "model_not_found"
    assert (await send(here, b"[[1,2]]")).json()["code"] == "shape_mismatch"
    assert (await send(here, b"[[1,2", "application/json")).json()["code"] == "invalid_json"


async def test_json_cannot_break_out_of_its_frame() -> None:
    reply = await send(world(), b'[[1,2,3]],"data":[[9,9,9]]', "application/json")
    assert reply.status == 400


async def test_ping() -> None:
    reply = await world().ask("GET", "/ping")
    assert (reply.status, reply.json()) == (200, {"status": "Healthy"})
    reply = await world(FakeDoor(state(ready=False, reason="loading"))).ask("GET", "/ping")
    assert (reply.status, reply.json()["status"], reply.json()["code"]) == (503, "Unhealthy", "not_ready")
