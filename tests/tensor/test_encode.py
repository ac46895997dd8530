"""Writing: what is written is read back, JSON is strict JSON, and equal requests have equal digests."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InvalidValue
from headrace.tensor import (
    Datatype,
    InferAnswer,
    InferRequest,
    RequestedOutput,
    Tensor,
    answer_object,
    decode_answer,
    decode_request,
    digest_inputs,
    encode,
    encode_answer,
    encode_request,
    tensor_to_json,
)
from tensor.tensors import FLOATS, NAMES, is_finite, named

SCALARS = st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
PARAMETERS = st.dictionaries(st.text(max_size=5).map("p_{}".format), SCALARS | st.text(max_size=5), max_size=3)
IDS = st.none() | st.text("abc 0-9é", min_size=1, max_size=9)


def strict(text: bytes) -> Any:
    """Parse as a strict client does."""

    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is not JSON")

    return json.loads(text, parse_constant=refuse)


@st.composite
def requests(draw: st.DrawFn, **options: bool) -> InferRequest:
    outputs = draw(st.none() | st.dictionaries(NAMES, st.none() | st.booleans(), min_size=1, max_size=3))
    return InferRequest(
        model="m",
        version=draw(st.none() | st.just("1")),
        id=draw(IDS),
        inputs=draw(named(**options)),
        outputs=None if outputs is None else tuple(RequestedOutput(n, b) for n, b in outputs.items()),
        parameters=draw(PARAMETERS),
        binary_default=draw(st.none() | st.booleans()),
    )


def fields(record: InferRequest | InferAnswer) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__struct_fields__}


@given(requests())
def test_a_request_survives_its_binary_form(request: InferRequest) -> None:
    body, header_length = encode_request(request)
    again = decode_request(body, header_length, model="m", version=request.version)
    assert fields(again) == fields(request)
    assert list(again.inputs) == list(request.inputs)
    strict(body[:header_length])
    assert header_length % 16 == 0


@given(requests(finite=True, text=True))
def test_json_and_binary_forms_of_a_request_are_the_same_request(request: InferRequest) -> None:
    body, header_length = encode_request(request)
    head = json.loads(body[:header_length])
    for item in head["inputs"]:
        del item["parameters"]
        item["data"] = tensor_to_json(request.inputs[item["name"]])
    as_json = decode_request(json.dumps(head).encode())
    assert as_json.inputs == request.inputs
    assert digest_inputs(as_json) == digest_inputs(request)


@given(st.data(), named(text=True))
def test_an_answer_survives_in_any_mix_of_forms(data: st.DataObject, outputs: dict[str, Tensor]) -> None:
    answer = InferAnswer(model="m", version="1", id="a", outputs=outputs, parameters={"p": 1})
    chosen = data.draw(st.booleans() | st.sets(st.sampled_from([*outputs, "other"])))
    body, header_length = encode_answer(answer, binary=chosen)
    head = strict(body if header_length is None else body[:header_length])
    again = decode_answer(body, header_length)
    assert (again.model, again.version, again.id, again.parameters) == ("m", "1", "a", {"p": 1})
    assert list(again.outputs) == list(outputs)
    some_binary = False
    for item in head["outputs"]:
        name = item["name"]
        is_binary = chosen is True or (chosen is not False and name in chosen)
        some_binary |= is_binary
        assert ("data" in item) is not is_binary
        if not is_binary:
            assert len(item["data"]) == int(np.prod(item["shape"]))
        if is_binary or outputs[name].datatype not in FLOATS:
            assert again.outputs[name] == outputs[name]
        else:
            # What JSON cannot say comes back as NaN; every other number is exact.
            finite = is_finite(outputs[name])
            assert np.array_equal(is_finite(again.outputs[name]), finite)
            assert again.outputs[name].array[finite].tobytes() == outputs[name].array[finite].tobytes()
    assert (header_length is not None) is some_binary


@given(named())
def test_the_plain_form_of_an_answer_never_fails_and_is_strict_json(outputs: dict[str, Tensor]) -> None:
    plain = answer_object(InferAnswer(model="m", outputs=outputs))
    assert strict(json.dumps(plain, allow_nan=False).encode()) == strict(msgspec.json.encode(plain))
    assert [item["name"] for item in plain["outputs"]] == list(outputs)


def test_bytes_that_are_no_text_are_refused_in_json_and_base64_in_the_plain_form() -> None:
    answer = InferAnswer(model="m", outputs={"mask": Tensor.of(np.array([b"\xff\0"], dtype=object))})
    with pytest.raises(InvalidValue) as caught:
        encode_answer(answer)
    assert caught.value.details["output"] == "mask"
    assert "binary" in caught.value.message
    assert answer_object(answer)["outputs"] == [
        {
            "name": "mask",
            "datatype": "BYTES",
            "shape": (1,),
            "parameters": {"content_type": "base64"},
            "data": ["/wA="],
        }
    ]
    body, header_length = encode_answer(answer, binary=["mask"])
    assert decode_answer(body, header_length).outputs == answer.outputs


def test_the_json_form_is_that_of_the_protocol() -> None:
    outputs = {
        "y": Tensor.of(np.float32([[1.5, np.nan], [np.inf, -np.inf]])),
        "label": Tensor.of(["crème", "猫🐈"]),
        "n": Tensor.of(np.int64(9007199254740993)),
    }
    body, header_length = encode_answer(InferAnswer(model="m", version="2", id="a1", outputs=outputs))
    assert header_length is None
    assert strict(body) == {
        "model_name": "m",
        "model_version": "2",
        "id": "a1",
        "outputs": [
            {"name": "y", "datatype": "FP32", "shape": [2, 2], "data": [1.5, None, None, None]},
            {"name": "label", "datatype": "BYTES", "shape": [2], "data": ["crème", "猫🐈"]},
            {"name": "n", "datatype": "INT64", "shape": [], "data": [9007199254740993]},
        ],
    }
    assert b"9007199254740993" in body
    bare, _ = encode_answer(InferAnswer(model="m", outputs={}))
    assert strict(bare) == {"model_name": "m", "outputs": []}


def test_binary_outputs_follow_the_json_in_its_order() -> None:
    outputs = {"b": Tensor.of(np.int8([1, 2])), "j": Tensor.of(np.int8([3])), "a": Tensor.of(["x"])}
    body, header_length = encode_answer(InferAnswer(model="m", outputs=outputs), binary={"a", "b"})
    assert header_length is not None
    assert body[header_length:] == b"\1\2" + b"\1\0\0\0x"
    sizes = [item.get("parameters") for item in strict(body[:header_length])["outputs"]]
    assert sizes == [{"binary_data_size": 2}, None, {"binary_data_size": 5}]


@pytest.mark.parametrize("datatype", [Datatype.FP32, Datatype.BF16, Datatype.FP16, Datatype.INT64, Datatype.BOOL])
def test_long_data_is_written_in_pieces_without_a_seam(datatype: Datatype, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(20).astype(datatype.numpy)
    if datatype in FLOATS:
        array[3] = np.nan
    answer = InferAnswer(model="m", outputs={"y": Tensor.of(array.reshape(4, 5))})
    whole, _ = encode_answer(answer)
    for piece in (1, 3, 5, 19):
        monkeypatch.setattr(encode, "_PIECE", piece)
        assert encode_answer(answer) == (whole, None)


# -- digests ------------------------------------------------------------------------------------------------


def request(**changes: Any) -> InferRequest:
    inputs = {"x": Tensor.of(np.float32([[1, 2], [3, 4]])), "n": Tensor.of(np.int64([1]))}
    return InferRequest(**{"model": "m", "inputs": inputs, "parameters": {"a": 1, "b": {"c": 2, "d": 3}}} | changes)


def test_the_order_of_inputs_and_parameters_and_the_wanted_form_do_not_count() -> None:
    base = request()
    same = [
        request(inputs=dict(reversed(base.inputs.items()))),
        request(parameters={"b": {"d": 3, "c": 2}, "a": 1}),
        request(binary_default=True),
        request(id="other"),
    ]
    assert {digest_inputs(other) for other in same} == {digest_inputs(base)}
    asked = request(outputs=(RequestedOutput("y"),))
    assert digest_inputs(asked) == digest_inputs(request(outputs=(RequestedOutput("y", True),)))


def test_everything_that_changes_the_answer_changes_the_digest() -> None:
    x = np.float32([[1, 2], [3, 4]])
    n = Tensor.of(np.int64([1]))
    negative = x.copy()
    negative[0, 0] = -0.0
    positive = x.copy()
    positive[0, 0] = 0.0
    different = [
        request(),
        request(inputs={"x": Tensor.of(x)}),
        request(inputs={"y": Tensor.of(x), "n": n}),
        request(inputs={"x": Tensor.of(x.reshape(1, 4)), "n": n}),
        request(inputs={"x": Tensor.of(x.astype(np.float64)), "n": n}),
        request(inputs={"x": Tensor.of(negative), "n": n}),
        request(inputs={"x": Tensor.of(positive), "n": n}),
        request(inputs={"x": n, "n": Tensor.of(x)}),
        request(inputs={"x": Tensor.of(["ab", "c"]), "n": n}),
        request(inputs={"x": Tensor.of(["a", "bc"]), "n": n}),
        request(outputs=(RequestedOutput("y"),)),
        request(outputs=(RequestedOutput("y"), RequestedOutput("z"))),
        request(outputs=(RequestedOutput("z"), RequestedOutput("y"))),
        request(outputs=(RequestedOutput("y", None, {"top": 1}),)),
        request(parameters={}),
        *[request(parameters={"a": value}) for value in (1, 1.0, True, "1", None, [1], 2)],
    ]
    assert len({digest_inputs(other) for other in different}) == len(different)


def test_a_digest_is_fixed_for_good() -> None:
    # It is kept beside idempotency keys: a new version must not call yesterday's request another one.
    assert digest_inputs(request()) == "b9f4c2c1de5ef6bb4e135ed1afb74bc93ca80d6e4708e32f0b1fe4a7548f7ffc"
