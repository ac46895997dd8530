"""Reading bodies: every form the protocol allows, and every fault as a typed error."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import (
    CallerError,
    DtypeMismatch,
    DuplicateInput,
    InvalidJson,
    InvalidRequest,
    InvalidValue,
    ShapeMismatch,
)
from headrace.tensor import (
    ID_LENGTH_MAX,
    Datatype,
    RequestedOutput,
    Signature,
    Tensor,
    TensorSpec,
    decode_answer,
    decode_request,
    tensor_to_bytes,
)

X = {"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}
BOMB = "[" * 250_000 + "]" * 250_000


def body(*inputs: Any, **more: Any) -> bytes:
    return json.dumps({"inputs": list(inputs), **more}).encode()


def binary(head: dict[str, Any], *parts: bytes) -> tuple[bytes, int]:
    text = json.dumps(head).encode()
    return text + b"".join(parts), len(text)


# -- what is taken ------------------------------------------------------------------------------------------


def test_a_json_request_is_read_whole() -> None:
    request = decode_request(
        body(
            X,
            id="a1",
            parameters={"priority": 1, "note": "n", "deep": {"a": [1]}, "binary_data_output": True},
            outputs=[{"name": "y", "parameters": {"binary_data": False, "top": 3}}, {"name": "z"}],
            model_name="ignored",
        ),
        model="m",
        version="2",
    )
    assert (request.model, request.version, request.id) == ("m", "2", "a1")
    assert request.inputs == {"x": Tensor.of(np.float32([[1, 2, 3]]))}
    assert request.parameters == {"priority": 1, "note": "n", "deep": {"a": [1]}}
    assert request.binary_default is True
    assert request.outputs == (RequestedOutput("y", False, {"top": 3}), RequestedOutput("z"))
    assert request.output_names == ["y", "z"]
    assert request.binary == frozenset({"z"})


@pytest.mark.parametrize(
    ("outputs", "default", "expected"),
    [
        (None, None, False),
        (None, True, True),
        ([{"name": "y"}], None, frozenset()),
        ([{"name": "y"}], True, True),
        ([{"name": "y", "parameters": {"binary_data": True}}], None, True),
        ([{"name": "y", "parameters": {"binary_data": True}}, {"name": "z"}], None, frozenset({"y"})),
        ([{"name": "y", "parameters": {"binary_data": False}}], True, frozenset()),
    ],
)
def test_an_output_says_its_form_before_the_default_does(outputs: Any, default: Any, expected: Any) -> None:
    more = {} if outputs is None else {"outputs": outputs}
    if default is not None:
        more["parameters"] = {"binary_data_output": default}
    assert decode_request(body(X, **more)).binary == expected


def test_no_outputs_and_an_empty_list_of_them_ask_for_all() -> None:
    assert decode_request(body(X)).outputs is None
    assert decode_request(body(X, outputs=[])).outputs is None
    assert decode_request(body(X, outputs=None, parameters=None, id=None)).output_names is None


def test_json_and_binary_tensors_mix_in_any_order() -> None:
    a, c = np.arange(2, dtype=np.int16), np.array(["p", "qq"])
    c_bytes = tensor_to_bytes(Tensor.of(c))
    head = {
        "inputs": [
            {"name": "a", "shape": [2], "datatype": "INT16", "parameters": {"binary_data_size": 4}},
            X,
            {
                "name": "c",
                "shape": [2],
                "datatype": "BYTES",
                "parameters": {"binary_data_size": len(c_bytes), "more": 1},
            },
            {"name": "e", "shape": [0], "datatype": "FP32", "parameters": {"binary_data_size": 0}},
        ]
    }
    request = decode_request(*binary(head, a.tobytes(), c_bytes))
    assert list(request.inputs) == ["a", "x", "c", "e"]
    assert request.inputs["a"] == Tensor.of(a)
    assert request.inputs["c"] == Tensor.of(c)
    assert request.inputs["e"].shape == (0,)


def test_a_header_length_over_all_of_a_json_body_is_fine() -> None:
    text = body(X)
    assert decode_request(text, len(text)).inputs == decode_request(text).inputs


def test_the_bytes_that_tritonclient_sends_are_read() -> None:
    # As `InferenceServerClient.generate_request_body` makes them for one INT32 and one BYTES input.
    head = (
        b'{"parameters":{"binary_data_output":true},"inputs":['
        b'{"name":"INPUT0","shape":[1,2],"datatype":"INT32","parameters":{"binary_data_size":8}},'
        b'{"name":"TEXT","shape":[1],"datatype":"BYTES","parameters":{"binary_data_size":6}}]}'
    )
    request = decode_request(head + b"\1\0\0\0\2\0\0\0\2\0\0\0hi", len(head))
    assert request.inputs["INPUT0"].array.tolist() == [[1, 2]]
    assert request.inputs["TEXT"].array.tolist() == [b"hi"]
    assert request.binary is True


@pytest.mark.parametrize("name", ["gpu_0/data_0", "input:0", "", "猫", "a" * 1000])
def test_any_string_may_be_a_name(name: str) -> None:
    assert list(decode_request(body({**X, "name": name})).inputs) == [name]


# -- the bare form ------------------------------------------------------------------------------------------


def only(datatype: Datatype, *shape: int, batchable: bool = True) -> Signature:
    out = TensorSpec("y", Datatype.FP32, (-1,) if batchable else (1,))
    return Signature((TensorSpec("x", datatype, shape),), (out,))


@pytest.mark.parametrize(
    ("shape", "count", "batchable", "expected"),
    [
        ((-1, 3), 3, True, (1, 3)),
        ((-1, 3), 6, True, (2, 3)),
        ((-1, -1), 4, True, (1, 4)),
        ((2, 3), 6, False, (2, 3)),
        ((), 1, False, ()),
        ((4, -1), 8, False, (4, 2)),
    ],
)
def test_a_bare_body_takes_its_shape_from_its_size(
    shape: tuple[int, ...], count: int, batchable: bool, expected: tuple[int, ...]
) -> None:
    data = np.arange(count, dtype=np.float32)
    request = decode_request(data.tobytes(), 0, signature=only(Datatype.FP32, *shape, batchable=batchable))
    assert request.inputs["x"] == Tensor.of(data.reshape(expected))
    assert request.binary is True


def test_a_bare_body_is_the_one_element_of_a_bytes_input() -> None:
    for shape, expected in (((1,), (1,)), ((-1,), (1,)), ((-1, 1), (1, 1)), ((), ())):
        tensor = decode_request(b"\xff\xd8 a picture", 0, signature=only(Datatype.BYTES, *shape)).inputs["x"]
        assert tensor.shape == expected
        assert tensor.array.ravel().tolist() == [b"\xff\xd8 a picture"]


@pytest.mark.parametrize(
    "signature",
    [
        None,
        Signature((), ()),
        Signature((TensorSpec("a", Datatype.FP32, (1,)), TensorSpec("b", Datatype.FP32, (1,))), ()),
        only(Datatype.FP32, -1, -1, -1),
        only(Datatype.FP32, -1, -1, batchable=False),
        only(Datatype.BYTES, -1, 2),
    ],
)
def test_a_bare_body_is_refused_where_its_shape_cannot_be_known(signature: Signature | None) -> None:
    with pytest.raises(InvalidRequest):
        decode_request(b"\0" * 12, 0, signature=signature)


@pytest.mark.parametrize("size", [0, 1, 11, 13])
def test_a_bare_body_of_broken_size_is_refused(size: int) -> None:
    signature = only(Datatype.FP32, -1, 3)
    if size == 0:
        assert decode_request(b"", 0, signature=signature).inputs["x"].shape == (0, 3)
    else:
        with pytest.raises(ShapeMismatch):
            decode_request(b"\0" * size, 0, signature=signature)


# -- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b" ",
        b"\x80\x81\xff\x00",
        b"{",
        b'{"inputs": [}',
        b'{"inputs": []} x',
        b'{"inputs": [], "a": "\xff"}',
        b'{"inputs": [], "a": "\\ud800"}',
        b'{"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [NaN]}]}',
        b'\xef\xbb\xbf{"inputs": []}',
        b"\xff\xfe{\0}\0",
        b'--boundary\r\nContent-Disposition: form-data; name="file"\r\n\r\n',
        b'{"inputs": [], "extra": %b}' % BOMB.encode(),
        b'{"inputs": [], "parameters": {"a": %b}}' % BOMB.encode(),
        b'{"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": %b}]}' % BOMB.encode(),
        b'{"inputs": %b}' % BOMB.encode(),
        BOMB.encode(),
        b'{"a":' * 250_000,
        b'{"inputs": [{"a":' * 100_000,
    ],
    ids=lambda text: repr(text[:40]),
)
def test_what_is_not_json_or_too_deep_is_a_small_typed_error(text: bytes) -> None:
    with pytest.raises((InvalidJson, InvalidRequest)) as caught:
        decode_request(text)
    assert len(caught.value.message) + len(json.dumps(caught.value.details)) < 500


@given(st.binary(max_size=200), st.none() | st.integers(-5, 300))
def test_no_body_does_more_than_raise_a_typed_error(data: bytes, header_length: int | None) -> None:
    for read in (decode_request, decode_answer):
        try:
            read(data, header_length)
        except CallerError as error:
            json.dumps(error.details, allow_nan=False)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["inputs", "outputs", "name", "shape", "datatype", "data", "parameters", "id", "binary_data_size"]
            ),
            inner,
            max_size=5,
        )
    ),
)


@given(VALUES)
def test_no_json_does_more_than_raise_a_typed_error(value: Any) -> None:
    text = json.dumps(value, allow_nan=True).encode()
    for read in (decode_request, decode_answer):
        try:
            read(text)
        except CallerError as error:
            json.dumps(error.details, allow_nan=False)


@pytest.mark.parametrize(
    ("text", "error", "names"),
    [
        (b"[]", InvalidRequest, "object"),
        (b"{}", InvalidRequest, "inputs"),
        (b'{"inputs": {}}', InvalidRequest, "inputs"),
        (b'{"inputs": [1]}', InvalidRequest, "inputs[0]"),
        (body({"shape": [1], "datatype": "FP32", "data": [1]}), InvalidRequest, "name"),
        (body({"name": "x", "datatype": "FP32", "data": [1]}), InvalidRequest, "'x'"),
        (body({"name": "x", "shape": [1], "data": [1]}), InvalidRequest, "datatype"),
        (body({**X, "shape": [1.0, 3]}), InvalidRequest, "'x'"),
        (body({**X, "shape": ["1", 3]}), InvalidRequest, "'x'"),
        (body(X, {**X, "name": "b", "shape": None}), InvalidRequest, "'b'"),
        (body({**X, "shape": [True, 3]}), InvalidRequest, "'x'"),
        (body({**X, "shape": [-1, 3]}), ShapeMismatch, "'x'"),
        (body({**X, "shape": [2**70, 3]}), ShapeMismatch, "'x'"),
        (body({**X, "datatype": "FP8"}), DtypeMismatch, "FP8"),
        (body({**X, "datatype": "fp32"}), DtypeMismatch, "fp32"),
        (body({**X, "data": None}), InvalidValue, "null"),
        (body({**X, "data": "1,2,3"}), InvalidValue, "'x'"),
        (body({k: v for k, v in X.items() if k != "data"}), InvalidRequest, "neither"),
        (body({**X, "parameters": {"binary_data_size": 12}}), InvalidRequest, "both"),
        (body({**X, "parameters": {"binary_data_size": "12"}}), InvalidRequest, "'x'"),
        (body({**X, "parameters": [1]}), InvalidRequest, "'x'"),
        (body(X, X), DuplicateInput, "'x'"),
        (body(X, id=7), InvalidRequest, "id"),
        (body(X, parameters=[1]), InvalidRequest, "parameters"),
        (body(X, parameters={"binary_data_output": "yes"}), InvalidRequest, "binary_data_output"),
        (body(X, parameters={"a": 2**64}), InvalidRequest, "64 bits"),
        (body(X, parameters={"a": {"b": [-(2**63) - 1]}}), InvalidRequest, "64 bits"),
        (body(X, parameters=json.loads('{"a":' * 20 + "1" + "}" * 20)), InvalidRequest, "nested"),
        (body(X, outputs=[{"name": "y"}, {"name": "y"}]), InvalidRequest, "'y'"),
        (body(X, outputs=[{"name": 1}]), InvalidRequest, "outputs[0]"),
        (body(X, outputs=[{"name": "y", "parameters": {"binary_data": 1}}]), InvalidRequest, "binary_data"),
    ],
)
def test_each_fault_has_its_error_and_names_its_place(text: bytes, error: type[CallerError], names: str) -> None:
    with pytest.raises(error) as caught:
        decode_request(text)
    assert type(caught.value) is error
    assert names in caught.value.message


@pytest.mark.parametrize(
    "text",
    [
        b'{"inputs": [], "parameters": {"a": [%b0]}}' % (b"[]," * 400_000),
        b'{"inputs": [], "outputs": [%b{"name": "y"}]}' % (b'{"name": ""},' * 100_000),
        b'{"inputs": [{"name": "x", "shape": [%b0], "datatype": "FP32", "data": []}]}' % (b"0," * 9000),
    ],
    ids=["parameters", "outputs", "shape"],
)
def test_members_that_should_be_small_are_refused_before_they_become_objects(text: bytes) -> None:
    with pytest.raises(InvalidRequest, match="longer"):
        decode_request(text)


@pytest.mark.parametrize("id", ["ok\nERROR paid=true", "\x1b[31m", "a\u2028b", "x" * (ID_LENGTH_MAX + 1), "\0"])
def test_an_id_that_could_forge_a_log_line_is_refused(id: str) -> None:
    with pytest.raises(InvalidRequest, match="printable"):
        decode_request(body(X, id=id))


@pytest.mark.parametrize(
    ("id", "kept"), [("", None), ("a b/ü:1", "a b/ü:1"), ("x" * ID_LENGTH_MAX, "x" * ID_LENGTH_MAX)]
)
def test_a_printable_id_is_kept(id: str, kept: str | None) -> None:
    assert decode_request(body(X, id=id)).id == kept


@pytest.mark.parametrize(
    ("size", "parts", "header", "names"),
    [
        (12, b"\0" * 11, "own", "received"),
        (12, b"\0" * 13, "own", "left over"),
        (11, b"\0" * 11, "own", "takes 12 bytes"),
        (-1, b"", "own", "received"),
        (2**70, b"\0" * 12, "own", "received"),
        (12, b"\0" * 12, "none", "JSON"),
        (12, b"", "none", "Inference-Header-Content-Length"),
        (12, b"\0" * 12, "beyond", "longer than the body"),
        (12, b"\0" * 12, "negative", "negative"),
    ],
)
def test_binary_parts_must_add_up(size: int, parts: bytes, header: str, names: str) -> None:
    head = {"name": "x", "shape": [1, 3], "datatype": "FP32", "parameters": {"binary_data_size": size}}
    text, length = binary({"inputs": [head]}, parts)
    said = {"own": length, "none": None, "beyond": len(text) + 1, "negative": -1}[header]
    with pytest.raises(CallerError) as caught:
        decode_request(text, said)
    assert names in caught.value.message


def test_bytes_behind_a_json_only_request_are_refused() -> None:
    text, length = binary({"inputs": [X]}, b"more")
    with pytest.raises(InvalidRequest, match="4 bytes are left over"):
        decode_request(text, length)


def test_an_answer_says_output_where_a_request_says_input() -> None:
    with pytest.raises(ShapeMismatch) as caught:
        decode_answer(json.dumps({"outputs": [{**X, "name": "y", "shape": [4]}]}).encode())
    assert caught.value.details["output"] == "y"
