from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import DtypeMismatch, DuplicateInput, HeadraceError, InvalidRequest, InvalidValue, ShapeMismatch
from headrace.tensor import Datatype, InferAnswer, Tensor, digest_inputs, encode_request, tensor_to_bytes
from headrace.tensor.decode import decode_request
from headrace.web.grpc.codec import answer_message, is_raw, read_request, set_parameter
from headrace.web.grpc.messages import messages

FIELDS = {
    Datatype.BOOL: ("bool_contents", [True, False]),
    Datatype.INT8: ("int_contents", [-128, 127]),
    Datatype.INT16: ("int_contents", [-(2**15), 2**15 - 1]),
    Datatype.INT32: ("int_contents", [-(2**31), 2**31 - 1]),
    Datatype.INT64: ("int64_contents", [-(2**63), 9007199254740993]),
    Datatype.UINT8: ("uint_contents", [0, 255]),
    Datatype.UINT16: ("uint_contents", [0, 2**16 - 1]),
    Datatype.UINT32: ("uint_contents", [0, 2**32 - 1]),
    Datatype.UINT64: ("uint64_contents", [9007199254740993, 2**64 - 1]),
    Datatype.FP32: ("fp32_contents", [0.1, float("-inf")]),
    Datatype.FP64: ("fp64_contents", [0.1, 1e308]),
    Datatype.BYTES: ("bytes_contents", [b"a\0b", "猫🐈".encode()]),
}


def request(datatype: str = "FP32", shape: tuple[int, ...] = (1, 3), raw: bytes | None = None, **contents: Any) -> Any:
    message = messages()["inference.ModelInferRequest"](model_name="m")
    tensor = message.inputs.add(name="x", datatype=datatype, shape=shape)
    for field, values in contents.items():
        getattr(tensor.contents, field).extend(values)
    if raw is not None:
        message.raw_input_contents.append(raw)
    return message


def answer_of(tensor: Tensor) -> InferAnswer:
    return InferAnswer(model="m", version="1", outputs={"y": tensor})


@pytest.mark.parametrize("datatype", FIELDS, ids=str)
def test_typed_contents_come_in_and_go_out_exactly(datatype: Datatype) -> None:
    field, values = FIELDS[datatype]
    message = request(datatype.value, (2, 1), **{field: values})
    assert not is_raw(message)
    tensor = read_request(message, "m").inputs["x"]
    wanted = np.array(values, dtype=datatype.numpy).reshape(2, 1)
    assert tensor == Tensor(datatype, wanted)
    output = answer_message(answer_of(tensor), raw=False).outputs[0]
    assert [f.name for f, _ in output.contents.ListFields()] == [field]
    back = list(getattr(output.contents, field))
    assert back == [np.float32(0.1).item(), float("-inf")] if datatype is Datatype.FP32 else back == values


@pytest.mark.parametrize("datatype", Datatype, ids=str)
def test_raw_contents_keep_every_bit(datatype: Datatype) -> None:
    if datatype is Datatype.BYTES:
        data = b"\x02\0\0\0ab\0\0\0\0"
    elif datatype is Datatype.BOOL:
        data = b"\1\0"
    else:
        data = bytes(range(0x7B, 0x7B + 2 * (datatype.itemsize or 0)))
    message = request(datatype.value, (2,), data)
    assert is_raw(message)
    tensor = read_request(message, "m").inputs["x"]
    response = answer_message(answer_of(tensor), raw=True)
    assert list(response.raw_output_contents) == [data]
    assert (response.outputs[0].datatype, list(response.outputs[0].shape)) == (datatype.value, [2])
    assert not response.outputs[0].HasField("contents")


@given(st.binary(max_size=64), st.lists(st.integers(-2, 9), max_size=4), st.sampled_from([d.value for d in Datatype]))
@settings(max_examples=200, deadline=None)
def test_whatever_comes_is_read_whole_or_refused_by_name(data: bytes, shape: list[int], datatype: str) -> None:
    try:
        tensor = read_request(request(datatype, tuple(shape), data), "m").inputs["x"]
    except HeadraceError as error:
        assert error.fault == "caller"
        assert error.details["input"] in ("x", "raw_input_contents")
    else:
        assert list(tensor.shape) == shape
        assert tensor_to_bytes(tensor) == data


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (request(raw=b"\0" * 12, fp32_contents=[1, 2, 3]), InvalidRequest),
        (request(datatype="FP16", shape=(1,), fp32_contents=[1]), InvalidRequest),
        (request(datatype="BF16", shape=(1,)), InvalidRequest),
        (request(fp64_contents=[1, 2, 3]), InvalidRequest),
        (request(fp32_contents=[1, 2, 3], int_contents=[1]), InvalidRequest),
        (request(fp32_contents=[1, 2]), ShapeMismatch),
        (request(shape=(-1, 3), raw=b"\0" * 12), ShapeMismatch),
        (request(shape=(0, -3), fp32_contents=[]), ShapeMismatch),
        (request(shape=(4611686018427387904, 4), raw=b"\0" * 12), ShapeMismatch),
        (request(shape=(4611686018427387904, 4), fp32_contents=[1]), ShapeMismatch),
        (request(shape=(1,) * 300, raw=b"\0" * 4), ShapeMismatch),
        (request(raw=b"\0" * 11), ShapeMismatch),
        (request(datatype="FP8"), DtypeMismatch),
        (request(datatype="INT8", shape=(2, 2), int_contents=[1, 2, 3, 300]), InvalidValue),
        (request(datatype="UINT16", shape=(1,), uint_contents=[65536]), InvalidValue),
    ],
)
def test_what_does_not_fit_is_refused_by_name(message: Any, kind: type[HeadraceError]) -> None:
    with pytest.raises(kind) as caught:
        read_request(message, "m")
    assert caught.value.details["input"] == "x"


def test_a2_a_value_out_of_range_is_named_with_its_place() -> None:
    with pytest.raises(InvalidValue) as caught:
        read_request(request("INT8", (2, 2), int_contents=[1, 2, 3, 300]), "m")
    assert caught.value.details["index"] == [1, 1]
    assert caught.value.details["actual"] == "300"


def test_as_many_raw_entries_as_inputs_and_no_input_twice() -> None:
    message = request(raw=b"\0" * 12)
    message.raw_input_contents.append(b"")
    with pytest.raises(InvalidRequest, match="2 entries for 1 inputs"):
        read_request(message, "m")
    message.inputs.add(name="x", datatype="FP32", shape=[0])
    with pytest.raises(DuplicateInput):
        read_request(message, "m")


@pytest.mark.parametrize("name", ["shared_memory_region", "classification"])
def test_extensions_that_would_change_the_answer_are_refused(name: str) -> None:
    message = request(raw=b"\0" * 12)
    output = message.outputs.add(name="y")
    output.parameters[name].int64_param = 1
    with pytest.raises(InvalidRequest, match=name):
        read_request(message, "m")
    message = request(raw=b"\0" * 12)
    message.inputs[0].parameters[name].string_param = "a"
    with pytest.raises(InvalidRequest, match=name):
        read_request(message, "m")


@pytest.mark.parametrize("id", ["a\nERROR paid=true", "x" * 129, "\x1b[31m"])
def test_a28_an_id_that_no_log_line_could_hold_is_refused(id: str) -> None:
    message = request(raw=b"\0" * 12)
    message.id = id
    with pytest.raises(InvalidRequest):
        read_request(message, "m")


def test_a_request_is_equal_to_its_twin_over_http() -> None:
    message = request("UINT64", (2,), uint64_contents=[2**64 - 1, 1])
    message.outputs.add(name="y").parameters["binary_data"].bool_param = True
    for key, value in {"b": 2**64 - 1, "a": -1, "s": "text", "d": 0.5, "t": True}.items():
        set_parameter(message.parameters[key], value)
    message.parameters["binary_data_output"].bool_param = True
    mine = read_request(message, "m")
    assert mine.parameters == {"a": -1, "b": 2**64 - 1, "d": 0.5, "s": "text", "t": True}
    twin = decode_request(
        b'{"inputs": [{"name": "x", "shape": [2], "datatype": "UINT64", "data": [18446744073709551615, 1]}],'
        b'"outputs": [{"name": "y"}],'
        b'"parameters": {"s": "text", "t": true, "a": -1, "b": 18446744073709551615, "d": 0.5}}',
        model="m",
    )
    assert digest_inputs(mine) == digest_inputs(twin)
    payload, header_length = encode_request(mine)
    assert digest_inputs(decode_request(payload, header_length, model="m")) == digest_inputs(mine)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
def test_a_parameter_that_has_no_json_form_is_refused(value: float | None) -> None:
    message = request(raw=b"\0" * 12)
    if value is None:
        message.parameters["p"].SetInParent()
    else:
        message.parameters["p"].double_param = value
    with pytest.raises(InvalidValue, match="'p'"):
        read_request(message, "m")


def test_one_half_precision_output_makes_a_typed_answer_raw() -> None:
    outputs = {
        "a": Tensor.of(np.array([1.5], np.float32)),
        "b": Tensor.of(np.array([2.5], np.float16)),
    }
    response = answer_message(InferAnswer(model="m", outputs=outputs), raw=False)
    assert list(response.raw_output_contents) == [np.float32(1.5).tobytes(), np.float16(2.5).tobytes()]
    assert not any(output.HasField("contents") for output in response.outputs)
