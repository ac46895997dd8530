from __future__ import annotations

import gzip
import json
import struct
import zlib
from typing import Any

import numpy as np
import pytest

from headrace.services.door import Call
from headrace.tensor import (
    Datatype,
    InferRequest,
    RequestedOutput,
    Signature,
    Tensor,
    TensorSpec,
    decode_answer,
    encode_request,
)
from web.kit import FakeDoor, Reply, World, signature, state, tensor, world

INFER = "/v2/models/echo/infer"
LENGTH = "inference-header-content-length"


def body(data: Any = (1, 2, 3), shape: Any = (1, 3), datatype: str = "FP32", **more: Any) -> bytes:
    one = {"name": "x", "shape": list(shape), "datatype": datatype, "data": data}
    return json.dumps({"inputs": [one], **more}).encode()


async def infer(here: World, content: bytes, length: int | str | None = None, path: str = INFER) -> Reply:
    return await here.ask("POST", path, content, {} if length is None else {LENGTH: str(length)})


async def test_json_in_and_json_out() -> None:
    reply = await infer(world(), body(id="a1"))
    assert reply.status == 200
    assert reply.json() == {
        "model_name": "echo",
        "model_version": "1",
        "id": "a1",
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 3], "data": [1.0, 2.0, 3.0]}],
    }
    assert LENGTH not in reply.headers


async def test_an_id_is_always_sent() -> None:
    reply = await infer(world(), body())
    assert reply.json()["id"] == reply.headers["x-request-id"]


async def test_a_version_may_be_named() -> None:
    here = world(FakeDoor(state("echo", "1"), state("echo", "v10")))
    reply = await infer(here, body(), path="/v2/models/echo/versions/1/infer")
    assert (reply.json()["model_version"], reply.headers["x-model-version"]) == ("1", "1")
    assert here.door.calls[0][0].version == "1"
    assert (await infer(here, body())).json()["model_version"] == "v10"
    assert here.door.calls[1][0].version is None
    reply = await infer(here, body(), path="/v2/models/echo/versions/3/infer")
    assert (reply.status, reply.json()["code"]) == (404, "version_not_found")
    reply = await infer(here, body(), path="/v2/models/other/infer")
    assert (reply.status, reply.json()["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("version", ["..%2f1", "%2e%2e", "1%0a", "9" * 300])
async def test_a23_path_parts_in_versions_are_not_found_and_not_repeated(version: str) -> None:
    reply = await infer(world(), body(), path=f"/v2/models/echo/versions/{version}/infer")
    assert (reply.status, reply.json()["code"]) == (404, "version_not_found")
    assert b".." not in reply.body
    assert b"9999" not in reply.body


async def test_binary_in_and_json_out() -> None:
    content, length = encode_request(InferRequest(inputs={"x": tensor([[1, 2, 3]])}))
    reply = await infer(world(), content, length)
    assert reply.json()["outputs"][0]["data"] == [1.0, 2.0, 3.0]
    assert reply.headers["content-type"] == "application/json"


async def test_json_in_and_binary_out() -> None:
    content = body(outputs=[{"name": "y", "parameters": {"binary_data": True}}])
    reply = await infer(world(), content)
    length = int(reply.headers[LENGTH])
    assert reply.headers["content-type"] == "application/octet-stream"
    assert json.loads(reply.body[:length])["outputs"][0]["parameters"] == {"binary_data_size": 12}
    assert reply.body[length:] == struct.pack("<3f", 1, 2, 3)


async def test_binary_both_ways_as_tritonclient_does_it() -> None:
    request = InferRequest(inputs={"x": tensor([[1, np.nan, np.inf]])}, binary_default=True)
    content, length = encode_request(request)
    reply = await infer(world(), content, length)
    answer = decode_answer(reply.body, int(reply.headers[LENGTH]))
    assert answer.outputs["y"] == request.inputs["x"], "not one bit may change"


async def test_outputs_come_in_the_form_and_order_each_was_asked_for() -> None:
    two = Signature(
        signature().inputs, (TensorSpec("y", Datatype.FP32, (-1, 3)), TensorSpec("z", Datatype.FP32, (-1, 3)))
    )

    async def run(inputs: dict[str, Tensor], call: Call) -> dict[str, Tensor]:
        return {"z": inputs["x"], "y": inputs["x"]}

    request = InferRequest(
        inputs={"x": tensor([[1, 2, 3]])},
        outputs=(RequestedOutput("z", True), RequestedOutput("y", False)),
        binary_default=True,
    )
    content, length = encode_request(request)
    reply = await infer(world(FakeDoor(state(signature=two), run=run)), content, length)
    head = json.loads(reply.body[: int(reply.headers[LENGTH])])
    assert [output["name"] for output in head["outputs"]] == ["z", "y"]
    assert "data" not in head["outputs"][0]
    assert head["outputs"][1]["data"] == [1.0, 2.0, 3.0]


async def test_a_length_of_nought_means_the_bare_bytes_of_the_only_input() -> None:
    reply = await infer(world(), struct.pack("<6f", *range(6)), 0)
    answer = decode_answer(reply.body, int(reply.headers[LENGTH]))
    assert answer.outputs["y"] == tensor([[0, 1, 2], [3, 4, 5]])


@pytest.mark.parametrize("length", ["-1", "x", "1.5", "99999", "9" * 40, ""])
async def test_a_wrong_length_header_is_refused(length: str) -> None:
    reply = await infer(world(), body(), length)
    assert (reply.status, reply.json()["code"]) in ((400, "invalid_request"), (400, "invalid_json"))


@pytest.mark.parametrize(
    ("content", "length", "code"),
    [
        (b"", None, "invalid_json"),
        (b"\x80\x81\xff\x00", None, "invalid_json"),
        (b"[]", None, "invalid_request"),
        (b"{}", None, "invalid_request"),
        (b'{"inputs": []}', None, "missing_input"),
        (body(shape=[-1, 3]), None, "shape_mismatch"),
        (body(shape=[0, -3]), None, "shape_mismatch"),
        (body(shape=[4611686018427387904, 4]), None, "shape_mismatch"),
        (body(shape=[]), None, "shape_mismatch"),
        (body(shape=[1] * 300), None, "shape_mismatch"),
        (body(shape=[1.5, 3]), None, "invalid_request"),
        (body(shape=["1", 3]), None, "invalid_request"),
        (body(shape=[1, 2]), None, "shape_mismatch"),
        (body(data=[[1, 2], [3]]), None, "shape_mismatch"),
        (body(datatype="FP64"), None, "dtype_mismatch"),
        (body(datatype="FLOAT"), None, "dtype_mismatch"),
        (body(data=[1, 2, "3"]), None, "invalid_value"),
        (body(outputs=[{"name": "scores_typo"}]), None, "unknown_output"),
        (body(outputs=[{"name": "y"}, {"name": "nope"}]), None, "unknown_output"),
        (body() + b"left over", len(body()), "invalid_request"),
    ],
)
async def test_a_bad_request_is_a_typed_error_without_its_bytes(content: bytes, length: int | None, code: str) -> None:
    reply = await infer(world(), content, length)
    assert (reply.status, reply.json()["code"]) == (400, code), reply.json()
    assert len(reply.body) < 1500


async def test_an_unknown_output_is_told_the_legal_ones() -> None:
    reply = await infer(world(), body(outputs=[{"name": "scores_typo"}]))
    assert "scores_typo" in reply.json()["error"]
    assert reply.json()["details"]["expected"] == ["y"]


async def test_a6_labels_that_are_not_ascii_come_back_in_both_forms() -> None:
    labels = ["crème", "猫🐈", "a\0b"]
    here = world(FakeDoor(state(signature=signature(Datatype.BYTES, (-1,)))))
    reply = await infer(here, body(labels, [3], "BYTES"))
    output = reply.json()["outputs"][0]
    assert (output["datatype"], output["shape"], output["data"]) == ("BYTES", [3], labels)
    reply = await infer(here, body(labels, [3], "BYTES", parameters={"binary_data_output": True}))
    packed = b"".join(struct.pack("<I", len(each.encode())) + each.encode() for each in labels)
    assert reply.body[int(reply.headers[LENGTH]) :] == packed


async def test_the_server_says_who_it_is_with_and_without_the_slash() -> None:
    for path in ("/v2", "/v2/"):
        reply = await world().ask("GET", path)
        assert reply.json()["name"] == "headrace"
        assert "binary_tensor_data" in reply.json()["extensions"]


async def test_metadata_has_versions_platform_and_numbers_for_shapes() -> None:
    here = world(FakeDoor(state("echo", "1"), state("echo", "2"), state("other", "1")))
    reply = await here.ask("GET", "/v2/models/echo")
    assert reply.json() == {
        "name": "echo",
        "versions": ["1", "2"],
        "platform": "python",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 3]}],
    }
    assert reply.headers["x-model-version"] == "2"
    assert (await here.ask("GET", "/v2/models/echo/versions/1")).headers["x-model-version"] == "1"
    assert (await here.ask("GET", "/v2/models/nope")).status == 404
    assert (await here.ask("GET", "/v2/models/echo/versions/9")).json()["code"] == "version_not_found"


async def test_a_model_is_ready_or_says_why_not() -> None:
    here = world(FakeDoor(state("good"), state("bad", ready=False, reason="the file is empty", signature=None)))
    assert (await here.ask("GET", "/v2/models/good/ready")).json() == {"name": "good", "ready": True}
    reply = await here.ask("GET", "/v2/models/bad/versions/1/ready")
    assert reply.status == 503
    assert (reply.json()["name"], reply.json()["ready"], reply.json()["code"]) == ("bad", False, "not_ready")
    assert reply.json()["details"]["reasons"] == ["the file is empty"]
    assert isinstance(reply.json()["error"], str)
    assert (await here.ask("GET", "/v2/models/none/ready")).status == 404
    assert (await here.ask("GET", "/v2/models/bad")).json()["code"] == "model_unavailable"


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (b"", ["good", "bad"]),
        (b"{}", ["good", "bad"]),
        (b'{"ready": true}', ["good"]),
        (b' {"x": 1} ', ["good", "bad"]),
    ],
)
async def test_the_index_lists_every_version_with_its_state(content: bytes, names: list[str]) -> None:
    here = world(FakeDoor(state("good"), state("bad", ready=False, reason="broken")))
    reply = await here.ask("POST", "/v2/repository/index", content)
    assert [entry["name"] for entry in reply.json()] == names
    assert reply.json()[0] == {"name": "good", "version": "1", "state": "READY", "reason": ""}
    if len(names) == 2:
        assert reply.json()[1] == {"name": "bad", "version": "1", "state": "UNAVAILABLE", "reason": "broken"}


@pytest.mark.parametrize(("content", "code"), [(b"{", "invalid_json"), (b'{"ready": 1}', "invalid_request")])
async def test_a_bad_index_request_is_refused(content: bytes, code: str) -> None:
    reply = await world().ask("POST", "/v2/repository/index", content)
    assert (reply.status, reply.json()["code"]) == (400, code)


X = struct.pack("<4f", 1, 2, 3, 4)
BINARY_X = b'{"name":"x","shape":[1,4],"datatype":"FP32","parameters":{"binary_data_size":16}}'
JSON_X = b'{"name":"x","shape":[1,4],"datatype":"FP32","data":[1.0,2.0,3.0,4.0]}'
DEFAULT = b'{"inputs":[' + BINARY_X + b'],"parameters":{"binary_data_output":true}}'
ALL = (
    b'{"id":"r2","inputs":[' + BINARY_X + b'],"outputs":[{"name":"y","parameters":{"binary_data":true}}],'
    b'"parameters":{"sequence_id":7,"sequence_start":true,"sequence_end":false,"priority":3,"timeout":5000,"k":"v"}}'
)
PERF = b'{"id":"","inputs":[' + JSON_X + b'],"outputs":[{"name":"y","parameters":{"binary_data":false}}]}'


@pytest.mark.parametrize(
    ("head", "tail", "headers", "binary"),
    [
        (b'{"inputs":[' + JSON_X + b'],"parameters":{"binary_data_output":true}}', b"", {}, True),
        (DEFAULT, X, {LENGTH: str(len(DEFAULT))}, True),
        (ALL, X, {LENGTH: str(len(ALL)), "X-T": "1"}, True),
        (PERF, b"", {LENGTH: str(len(PERF)), "Content-Type": "application/json"}, False),
        (b'{"inputs":[' + JSON_X + b"]}", b"", {"Content-Type": "application/octet-stream"}, False),
    ],
    ids=["json in", "the default", "everything at once", "perf_analyzer", "the asyncio client"],
)
@pytest.mark.parametrize("encoding", ["", "gzip", "deflate"])
async def test_what_clients_really_send_is_understood(
    head: bytes, tail: bytes, headers: dict[str, str], binary: bool, encoding: str
) -> None:
    content = head + tail
    if encoding:
        headers = headers | {"Content-Encoding": encoding, "Accept-Encoding": encoding}
        content = gzip.compress(content) if encoding == "gzip" else zlib.compress(content)
    here = world(FakeDoor(state(signature=signature(Datatype.FP32, (-1, 4)))))
    reply = await here.ask("POST", INFER + "?q=1", content, headers)
    assert reply.status == 200
    answer = decode_answer(reply.body, int(reply.headers[LENGTH]) if binary else None)
    assert answer.outputs["y"] == tensor([[1, 2, 3, 4]])
    assert answer.id == ("r2" if head is ALL else reply.headers["x-request-id"])


@pytest.mark.parametrize("parameter", ["classification", "shared_memory_region"])
async def test_an_extension_that_would_change_the_answer_is_refused(parameter: str) -> None:
    here = world()
    reply = await infer(here, body(outputs=[{"name": "y", "parameters": {parameter: 1}}]))
    assert (reply.status, reply.json()["details"]["parameter"]) == (400, parameter)
    assert here.door.calls == []
