from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from headrace.services.door import Call
from headrace.tensor import Datatype, Signature, Tensor, TensorSpec
from web.kit import FakeDoor, Reply, World, signature, state, tensor, world

PREDICT = "/v1/models/echo:predict"

TWO = Signature(
    (TensorSpec("a", Datatype.FP32, (-1,)), TensorSpec("b", Datatype.INT64, (-1, 2))),
    (TensorSpec("p", Datatype.FP32, (-1,)), TensorSpec("q", Datatype.INT64, (-1, 2))),
)


async def swap(inputs: dict[str, Tensor], call: Call) -> dict[str, Tensor]:
    return {"p": inputs["a"], "q": inputs["b"]}


def two() -> World:
    return world(FakeDoor(state(signature=TWO), run=swap))


def text() -> World:
    return world(FakeDoor(state(signature=signature(Datatype.BYTES, (-1,)))))


async def predict(here: World, body: Any, path: str = PREDICT) -> Reply:
    return await here.ask("POST", path, body if isinstance(body, bytes) else json.dumps(body).encode())


async def test_rows_in_and_predictions_out() -> None:
    reply = await predict(world(), {"signature_name": "serving_default", "instances": [[1, 2, 3], [4, 5, 6]]})
    assert (reply.status, reply.json()) == (200, {"predictions": [[1, 2, 3], [4, 5, 6]]})
    reply = await predict(world(), {"instances": [{"x": [1, 2, 3]}]})
    assert reply.json() == {"predictions": [[1, 2, 3]]}


async def test_columns_in_and_outputs_out() -> None:
    assert (await predict(world(), {"inputs": [[1, 2, 3]]})).json() == {"outputs": [[1, 2, 3]]}
    assert (await predict(world(), {"inputs": {"x": [[1, 2, 3]]}})).json() == {"outputs": [[1, 2, 3]]}


async def test_several_tensors_are_named_by_row_and_by_column() -> None:
    rows = [{"a": 1, "b": [2**60, 3]}, {"b": [4, 5], "a": 2}]
    reply = await predict(two(), {"instances": rows})
    assert reply.json() == {"predictions": [{"p": 1.0, "q": [2**60, 3]}, {"p": 2.0, "q": [4, 5]}]}
    reply = await predict(two(), {"inputs": {"a": [1], "b": [[2, 3]]}})
    assert reply.json() == {"outputs": {"p": [1.0], "q": [[2, 3]]}}


async def test_bytes_come_as_text_or_as_base64_and_go_back_so() -> None:
    reply = await predict(text(), {"instances": ["é", {"b64": base64.b64encode(b"ab").decode()}]})
    assert reply.json() == {"predictions": ["é", "ab"]}
    here = text()
    raw = {"b64": base64.b64encode(b"\xff\x00").decode()}
    assert (await predict(here, {"instances": [raw]})).json() == {"predictions": [raw]}
    assert here.door.calls[0][0].inputs["x"].array.tolist() == [b"\xff\x00"]
    assert (await predict(text(), {"inputs": [raw, raw]})).json() == {"outputs": [raw, raw]}
    named = Signature(signature(Datatype.BYTES, (-1,)).inputs, (TensorSpec("y_bytes", Datatype.BYTES, (-1,)),))

    async def run(inputs: dict[str, Tensor], call: Call) -> dict[str, Tensor]:
        return {"y_bytes": inputs["x"]}

    reply = await predict(world(FakeDoor(state(signature=named), run=run)), {"instances": ["ab"]})
    assert reply.json() == {"predictions": [{"b64": "YWI="}]}


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", "invalid_json"),
        (b"[]", "invalid_request"),
        ({}, "invalid_request"),
        ({"instances": [[1, 2, 3]], "inputs": [[1, 2, 3]]}, "invalid_request"),
        ({"instances": 5}, "invalid_request"),
        ({"instances": []}, "invalid_request"),
        ({"instances": [[1, 2, 3]], "signature_name": "other"}, "invalid_request"),
        ({"instances": [{"x": [1, 2, 3]}, 5]}, "invalid_request"),
        ({"instances": [{"z": [1, 2, 3]}]}, "unknown_input"),
        ({"instances": [{"x": [1, 2, 3], "z": 1}]}, "unknown_input"),
        ({"inputs": {}}, "missing_input"),
        ({"instances": [[1, 2]]}, "shape_mismatch"),
        ({"instances": [[1, 2, "3"]]}, "invalid_value"),
        ({"instances": [{}] * 100_001}, "invalid_request"),
    ],
)
async def test_what_is_wrong_is_told_in_our_own_form(body: Any, code: str) -> None:
    reply = await predict(world(), body)
    assert (reply.status, reply.json()["code"]) == (400, code)
    assert isinstance(reply.json()["error"], str)


@pytest.mark.parametrize("value", [{"b64": "!"}, {"b64": 1}, {"b64": "AA==", "x": 1}, ["a", {"b64": "AA=="}], 5])
async def test_broken_base64_is_refused(value: Any) -> None:
    reply = await predict(text(), {"instances": ["a", value, {"b64": "AA=="}]})
    assert reply.status == 400


async def test_outputs_that_have_no_rows_need_the_columnar_form() -> None:
    async def run(inputs: dict[str, Tensor], call: Call) -> dict[str, Tensor]:
        return {"y": tensor(7.0)}

    here = world(FakeDoor(run=run))
    assert (await predict(here, {"instances": [[1, 2, 3]]})).json()["code"] == "invalid_request"
    assert (await predict(here, {"inputs": [[1, 2, 3]]})).json() == {"outputs": 7.0}


async def test_the_state_of_a_model_serves_both_clients() -> None:
    here = world(FakeDoor(state("echo", "1"), state("echo", "2")))
    reply = await here.ask("GET", "/v1/models/echo")
    assert (reply.status, reply.json()["ready"]) == (200, True)
    assert [one["state"] for one in reply.json()["model_version_status"]] == ["AVAILABLE", "AVAILABLE"]
    reply = await here.ask("GET", "/v1/models/echo/versions/1")
    assert [one["version"] for one in reply.json()["model_version_status"]] == ["1"]
    assert (await here.ask("GET", "/v1/models")).json() == {"models": ["echo"]}
    assert (await here.ask("GET", "/v1/models/none")).status == 404
    reply = await world(FakeDoor(state(ready=False, reason="loading"))).ask("GET", "/v1/models/echo")
    assert (reply.status, reply.json()["ready"]) == (503, False)
    assert reply.json()["model_version_status"][0]["status"]["error_message"] == "loading"
