from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import HeadraceError, ModelFailed
from headrace.services.door import Call
from headrace.tensor import Datatype, Signature, Tensor, TensorSpec
from headrace.web.predict import _read_data, _read_inputs, inputs_of
from web.kit import FakeDoor, signature, state, tensor, world

pytestmark = pytest.mark.filterwarnings("error")


async def test_the_answer_has_the_prediction_the_model_its_version_and_the_id() -> None:
    reply = await world().predict([[1, 2.5, -3]], {"X-Request-Id": "mine"})
    assert reply.status == 200
    assert reply.json() == {
        "prediction": [[1.0, 2.5, -3.0]],
        "model": "echo",
        "model_version": "1",
        "request_id": "mine",
    }
    assert reply.headers["x-request-id"] == "mine"
    assert reply.headers["x-model-version"] == "1"
    assert reply.headers["content-type"] == "application/json"


async def test_a_model_may_be_named_in_the_path() -> None:
    here = world(FakeDoor(state("one"), state("two", "7")))
    reply = await here.predict([[1, 2, 3]], path="/predict/two")
    assert (reply.status, reply.json()["model"], reply.json()["model_version"]) == (200, "two", "7")


async def test_several_models_are_named_where_none_was() -> None:
    reply = await world(FakeDoor(state("one"), state("two"))).predict([[1, 2, 3]])
    assert (reply.status, reply.json()["code"]) == (400, "invalid_request")
    assert reply.json()["details"]["models"] == ["one", "two"]


async def test_several_versions_of_one_model_are_one_model() -> None:
    here = world(FakeDoor(state("one", "1"), state("one", "2")))
    assert (await here.predict([[1, 2, 3]])).json()["model_version"] == "2"


async def test_no_model_at_all_is_not_ready() -> None:
    door = FakeDoor()
    door.states = ()
    reply = await world(door).predict([[1, 2, 3]])
    assert (reply.status, reply.json()["code"]) == (503, "not_ready")


async def test_a_model_that_is_not_there_is_not_found() -> None:
    reply = await world().predict([[1, 2, 3]], path="/predict/other")
    assert (reply.status, reply.json()["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("name", ["..%2fsecret", "%2e%2e", "%2fetc%2fpasswd", "echo%00", "e" * 5000, "a%1b%5b31m"])
async def test_a23_path_parts_in_names_are_not_found_and_not_repeated(name: str) -> None:
    reply = await world().predict([[1, 2, 3]], path=f"/predict/{name}")
    assert reply.status == 404
    assert reply.json()["code"] == "model_not_found"
    assert not any(part in reply.body for part in (b"secret", b"passwd", b"..", b"eee", b"31m"))


async def test_a_model_that_loads_is_unavailable_with_its_reason() -> None:
    reply = await world(FakeDoor(state(signature=None, ready=False, reason="loading"))).predict([[1, 2, 3]])
    assert (reply.status, reply.json()["code"]) == (503, "model_unavailable")
    assert reply.json()["details"]["reason"] == "loading"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"not json", "invalid_json"),
        (b'{"data": [[1,2,NaN]]}', "invalid_json"),
        (b'{"data": [[1,2,Infinity]]}', "invalid_json"),
        (b'{"data": [[1,2,3]],}', "invalid_json"),
        (b'\xef\xbb\xbf{"data": [[1,2,3]]}', "invalid_json"),
        (b"[]", "invalid_request"),
        (b"null", "invalid_request"),
        (b'"text"', "invalid_request"),
        (b"{}", "invalid_request"),
        (b'{"dat": [[1,2,3]]}', "invalid_request"),
        (b'{"data": null}', "invalid_value"),
        (b'{"data": [[1,2,null]]}', "invalid_value"),
        (b'{"data": [["1","2","3"]]}', "invalid_value"),
        (b'{"data": [[1,2,true]]}', "invalid_value"),
        (b'{"data": [[1,2,1e39]]}', "invalid_value"),
        (b'{"data": [[1,2],[3]]}', "shape_mismatch"),
        (b'{"data": [1,2,3]}', "shape_mismatch"),
        (b'{"data": [[1,2]]}', "shape_mismatch"),
        (b'{"data": []}', "shape_mismatch"),
        (b'{"data": 1}', "shape_mismatch"),
        (b'{"data": {"z": [[1,2,3]]}}', "unknown_input"),
        (b'{"data": {}}', "missing_input"),
    ],
)
async def test_a_bad_body_is_the_callers_fault_and_is_named(body: bytes, code: str) -> None:
    here = world()
    reply = await here.ask("POST", "/predict", body)
    assert (reply.status, reply.json()["code"]) == (400, code), reply.json()
    assert set(reply.json()) == {"error", "code", "details", "request_id", "status"}
    assert here.door.calls == [] or code == "shape_mismatch"


async def test_who_sends_inputs_is_told_of_data() -> None:
    reply = await world().ask("POST", "/predict", b'{"inputs": [[1,2,3]]}')
    assert reply.status == 400
    assert "`data`" in reply.json()["error"]
    assert "`inputs`" in reply.json()["error"]


async def test_keys_that_are_not_known_are_ignored() -> None:
    reply = await world().ask("POST", "/predict", b'{"x": {"y": [1]}, "data": [[1,2,3]], "parameters": {}}')
    assert reply.status == 200


@pytest.mark.parametrize("place", ['{"data": %s}', '{"data": [[1,2,3]], "x": %s}', '{"x": %s, "data": [[1,2,3]]}'])
async def test_a8_deep_nesting_is_refused_wherever_it_is(place: str) -> None:
    deep = "[" * 250_000 + "]" * 250_000
    reply = await world().ask("POST", "/predict", (place % deep).encode())
    assert reply.status == 400
    assert len(reply.body) < 1000


@pytest.mark.parametrize("escape", [b"\\ud800", b"\\udc00\\ud800"])
async def test_a7_half_a_surrogate_pair_is_refused(escape: bytes) -> None:
    here = world(FakeDoor(state(signature=signature(Datatype.BYTES, (-1,)))))
    reply = await here.ask("POST", "/predict", b'{"data": ["' + escape + b'"]}')
    assert reply.status == 400
    reply = await here.ask("POST", "/predict", b'{"data": ["ok"], "x": "\xff"}')
    assert (reply.status, reply.json()["code"]) == (400, "invalid_json")


@pytest.mark.parametrize(
    ("datatype", "good"),
    [
        (Datatype.INT64, [9007199254740993, -9223372036854775808]),
        (Datatype.UINT64, [18446744073709551615]),
        (Datatype.BOOL, [True, False]),
        (Datatype.BYTES, ["crème", "猫🐈", "a\0b", ""]),
    ],
)
async def test_a2_values_come_back_digit_for_digit(datatype: Datatype, good: list[Any]) -> None:
    here = world(FakeDoor(state(signature=signature(datatype, (-1,)))))
    assert (await here.predict(good)).json()["prediction"] == good


@pytest.mark.parametrize(
    ("datatype", "bad"),
    [
        (Datatype.INT64, 9223372036854775808),
        (Datatype.UINT64, -1),
        (Datatype.INT8, 300),
        (Datatype.INT64, 1.5),
        (Datatype.INT64, True),
        (Datatype.INT64, "7"),
    ],
)
async def test_a2_a_bad_value_is_named_with_its_datatype(datatype: Datatype, bad: Any) -> None:
    reply = await world(FakeDoor(state(signature=signature(datatype, (-1,))))).predict([bad])
    assert (reply.status, reply.json()["code"]) == (400, "invalid_value")
    details = reply.json()["details"]
    assert (details["input"], details["expected"]) == ("x", str(datatype))


async def test_a1_nan_and_infinity_are_null_and_none_is_missing() -> None:
    async def div(inputs: dict[str, Tensor], call: Call) -> dict[str, Tensor]:
        with np.errstate(all="ignore"):
            return {"y": Tensor.of(inputs["x"].array / np.float32(0))}

    reply = await world(FakeDoor(run=div)).predict([[1.0, 0.0, -1.0]])
    assert (reply.status, reply.json()["prediction"]) == (200, [[None, None, None]])


TWO = Signature(
    (TensorSpec("a", Datatype.FP32, (-1, 2)), TensorSpec("b", Datatype.INT64, (-1,))),
    (TensorSpec("sum", Datatype.FP32, (-1,)), TensorSpec("b", Datatype.INT64, (-1,))),
)


async def add(inputs: dict[str, Tensor], call: Call) -> dict[str, Tensor]:
    return {"sum": tensor(inputs["a"].array.sum(axis=1)), "b": inputs["b"]}


async def test_several_inputs_and_outputs_are_objects_by_name() -> None:
    here = world(FakeDoor(state(signature=TWO), run=add))
    reply = await here.predict({"b": [7, 8], "a": [[1, 2], [3, 4]]})
    assert reply.json()["prediction"] == {"sum": [3.0, 7.0], "b": [7, 8]}


@pytest.mark.parametrize(
    ("data", "code", "name"),
    [
        ({"a": [[1, 2]]}, "missing_input", "b"),
        ({"a": [[1, 2]], "b": [1], "c": [1]}, "unknown_input", "c"),
        ({"a": [[1, 2]], "c": [1]}, "unknown_input", "c"),
    ],
)
async def test_a5_a_wrong_name_is_named_beside_the_legal_ones(data: Any, code: str, name: str) -> None:
    reply = await world(FakeDoor(state(signature=TWO), run=add)).predict(data)
    assert (reply.status, reply.json()["code"]) == (400, code)
    assert reply.json()["details"]["input"] == name
    assert reply.json()["details"]["expected"] == ["a", "b"]


async def test_several_inputs_need_an_object() -> None:
    reply = await world(FakeDoor(state(signature=TWO), run=add)).predict([[1, 2]])
    assert (reply.status, reply.json()["code"]) == (400, "invalid_request")
    assert reply.json()["details"]["expected"] == ["a", "b"]


async def test_an_only_input_may_be_named_too() -> None:
    assert (await world().predict({"x": [[1, 2, 3]]})).json()["prediction"] == [[1.0, 2.0, 3.0]]


async def test_a_model_that_fails_is_our_fault() -> None:
    async def broken(inputs: dict[str, Tensor], call: Call) -> dict[str, Tensor]:
        raise ModelFailed

    here = world(FakeDoor(run=broken))
    reply = await here.predict([[1, 2, 3]])
    assert (reply.status, reply.json()["code"]) == (500, "model_failed")
    assert reply.headers["x-model-version"] == "1"


async def test_an_accident_is_internal_and_its_cause_is_in_the_log_alone() -> None:
    async def broken(inputs: dict[str, Tensor], call: Call) -> dict[str, Tensor]:
        raise ZeroDivisionError("secret cause")

    here = world(FakeDoor(run=broken))
    reply = await here.predict([[1, 2, 3]], {"X-Request-Id": "r-1"})
    assert (reply.status, reply.json()["code"]) == (500, "internal")
    assert b"secret" not in reply.body
    (line,) = here.lines.all("request_failed")
    assert line["request_id"] == "r-1"
    assert "secret cause" in line["error"]


async def test_an_empty_batch_is_legal_where_the_signature_says_so() -> None:
    reply = await world(FakeDoor(state(signature=signature(Datatype.FP32, (-1,))))).predict([])
    assert (reply.status, reply.json()["prediction"]) == (200, [])


async def test_the_door_is_told_what_came_around_the_request() -> None:
    here = world()
    headers = {"X-Request-Id": "r", "Idempotency-Key": '"k"', "Request-Timeout": "1.5"}
    await here.predict([[1, 2, 3]], headers)
    ((request, call),) = here.door.calls
    assert (request.model, request.version, request.id) == ("echo", None, None)
    assert (call.request_id, call.key, call.deadline_s, call.wait_s) == ("r", "k", 1.5, None)


async def test_pieces_of_a_body_make_one_request() -> None:
    body = json.dumps({"data": [[1, 2, 3]]}).encode()
    reply = await world().ask("POST", "/predict", [body[:5], body[5:9], b"", body[9:]])
    assert reply.status == 200


BODIES = st.one_of(
    st.binary(max_size=40),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(width=64) | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["data", "inputs", "x"]), inner),
        max_leaves=12,
    ).map(lambda value: json.dumps({"data": value}).encode()),
    st.lists(st.lists(st.floats(-4, 4, width=16) | st.integers(-5, 300), min_size=2, max_size=2), max_size=3).map(
        lambda rows: json.dumps({"more": 1, "data": rows}).encode()
    ),
)


@given(body=BODIES, datatype=st.sampled_from(list(Datatype)), rank=st.integers(0, 3))
def test_the_quick_way_to_read_a_body_reads_what_the_careful_one_does(
    body: bytes, datatype: Datatype, rank: int
) -> None:
    spec = TensorSpec("x", datatype, (-1,) * rank)
    chosen = Signature((spec,), ())

    def said(read: Callable[[], dict[str, Tensor]]) -> object:
        try:
            (found,) = read().values()
        except HeadraceError as error:
            return error.code, error.message, error.details
        held = found.array.tolist() if datatype is Datatype.BYTES else found.array.tobytes()
        return found.datatype, found.array.dtype, found.shape, held

    assert said(lambda: inputs_of(body, chosen)) == said(lambda: _read_inputs(_read_data(body), chosen))
