"""Cases from public failure reports, tried from outside on both roads; the same input, the same answer."""

from __future__ import annotations

import base64
import concurrent.futures
import http.client
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from journeys.stack import Stack, free_port, tensor, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

NAMES = ("echo", "echo64", "ids", "text", "label", "div", "neg")
MODELS = [f"{name}=python:headrace.testing.models:{name}" for name in NAMES]


def strict(body: bytes) -> Any:
    """Parse as a strict client does: `NaN` and `Infinity` are no JSON."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} in an answer")

    return json.loads(body, parse_constant=refuse)


class Road:
    """One running server."""

    def __init__(self, port: int, is_long: bool) -> None:
        self.port, self.is_long = port, is_long

    def send(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        status, _, content = self.send("POST", path, data, {"Content-Type": "application/json", **named})
        return status, strict(content)

    def infer(self, model: str, body: Any, **headers: str) -> tuple[int, Any]:
        return self.post(f"/v2/models/{model}/infer", body, **headers)

    def refused(self, model: str, body: Any, *codes: str) -> dict[str, Any]:
        """Send what must be answered 400 with one of those codes, and see that the server is still alive."""
        status, answer = self.infer(model, body)
        assert status == 400, answer
        assert answer["code"] in codes, answer
        assert isinstance(answer["error"], str)
        assert self.infer("echo", tensor("x", "FP32", [[1, 2, 3]]))[0] == 200
        return dict(answer)


@pytest.fixture(scope="module")
def long_road(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Road]:
    stack = Stack(tmp_path_factory.mktemp("long"), MODELS)
    stack.start()
    try:
        _run(stack.ready())
        yield Road(stack.port, is_long=True)
    finally:
        stack.destroy()


@pytest.fixture(scope="module")
def short_road(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Road]:
    port = free_port()
    command = [sys.executable, "-m", "headrace", "serve", *MODELS, "--port", str(port)]
    with (tmp_path_factory.mktemp("short") / "serve.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "HEADRACE_MODEL_THREADS": "1"})
    road = Road(port, is_long=False)

    def ready() -> bool:
        assert process.poll() is None
        try:
            return road.send("GET", "/v2/health/ready")[0] == 200
        except OSError:
            return False

    try:
        _run(until(ready, "ready"))
        yield road
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture(params=["short", "long"])
def road(request: pytest.FixtureRequest) -> Road:
    found: Road = request.getfixturevalue(f"{request.param}_road")
    return found


def _run(coroutine: Any) -> Any:
    import asyncio

    return asyncio.run(coroutine)


def test_a1_nan_and_infinity_are_null_in_json_and_exact_in_binary(road: Road) -> None:
    body = tensor("x", "FP32", [[1.0, 0.0, -1.0]])
    status, answer = road.infer("div", body)
    assert (status, answer["outputs"][0]["data"], answer["outputs"][0]["shape"]) == (200, [None] * 3, [1, 3])
    status, answer = road.post("/predict/div", {"data": [[1.0, 0.0, -1.0]]})
    assert (status, answer["prediction"]) == (200, [[None] * 3])
    asked = {**body, "outputs": [{"name": "y", "parameters": {"binary_data": True}}]}
    status, headers, content = road.send("POST", "/v2/models/div/infer", json.dumps(asked).encode())
    length = int(headers["inference-header-content-length"])
    assert status == 200
    first, second, third = struct.unpack("<3f", content[length:])
    assert first == float("inf") and second != second and third == float("-inf")
    if road.is_long:
        _, accepted = road.infer("div", body, Prefer="respond-async")
        _, _, content = road.send("GET", f"/requests/{accepted['id']}?wait=20")
        assert strict(content)["result"]["outputs"][0]["data"] == [None] * 3


@pytest.mark.parametrize(
    ("model", "datatype", "values"),
    [("echo64", "INT64", [9007199254740993, -9223372036854775808]), ("ids", "UINT64", [18446744073709551615])],
)
def test_a2_64_bit_integers_are_exact(road: Road, model: str, datatype: str, values: list[int]) -> None:
    status, answer = road.infer(model, tensor("x", datatype, values))
    assert status == 200
    assert answer["outputs"][0]["data"] == values
    assert answer["outputs"][0]["shape"] == [len(values)]


@pytest.mark.parametrize(
    ("model", "datatype", "literal"),
    [
        ("echo64", "INT64", "9223372036854775808"),
        ("ids", "UINT64", "-1"),
        ("echo64", "INT64", "1.5"),
        ("echo64", "INT64", "true"),
        ("echo64", "INT64", '"7"'),
        ("echo64", "INT64", "null"),
    ],
)
def test_a2_a_bad_value_is_named_and_never_coerced(road: Road, model: str, datatype: str, literal: str) -> None:
    body = f'{{"inputs":[{{"name":"x","shape":[1],"datatype":"{datatype}","data":[{literal}]}}]}}'
    answer = road.refused(model, body.encode(), "invalid_value")
    assert answer["details"]["input"] == "x"
    assert datatype in json.dumps(answer)


@pytest.mark.parametrize(
    "shape",
    ["[-1,3]", "[0,-3]", "[4611686018427387904,4]", "[]", "[" + ",".join(["1"] * 300) + "]", "[1.0,3]", '["1",3]'],
)
def test_a3_absurd_shapes_are_refused_and_name_the_input(road: Road, shape: str) -> None:
    body = f'{{"inputs":[{{"name":"x","shape":{shape},"datatype":"FP32","data":[1,2,3]}}]}}'
    answer = road.refused("echo", body.encode(), "shape_mismatch", "invalid_request", "invalid_value")
    assert answer["details"]["input"] == "x"


@pytest.mark.parametrize(
    ("model", "datatype", "shape", "data"),
    [
        ("text", "BYTES", [1], ["alpha", "beta"]),
        ("text", "BYTES", [2], ["alpha"]),
        ("echo", "FP32", [2, 3], [[1, 2, 3], [4]]),
        ("echo", "FP32", [2, 3], [[1, 2], [3, 4], [5, 6]]),
    ],
)
def test_a4_declared_and_received_counts_must_agree(
    road: Road, model: str, datatype: str, shape: list[int], data: list[Any]
) -> None:
    road.refused(model, tensor("x", datatype, data, shape), "shape_mismatch", "invalid_value", "invalid_request")


def test_a4_flat_data_of_the_right_count_stays_legal(road: Road) -> None:
    status, answer = road.infer("echo", tensor("x", "FP32", [1, 2, 3, 4, 5, 6], [2, 3]))
    assert (status, answer["outputs"][0]["shape"]) == (200, [2, 3])


def test_a5_unknown_and_missing_names_are_named_with_the_legal_ones(road: Road) -> None:
    good = tensor("x", "FP32", [[1, 2, 3]])
    for outputs in ([{"name": "scores_typo"}], [{"name": "y"}, {"name": "scores_typo"}]):
        answer = road.refused("echo", {**good, "outputs": outputs}, "unknown_output")
        assert "scores_typo" in answer["error"] and "y" in json.dumps(answer["details"])
    extra = {"inputs": [*good["inputs"], {**good["inputs"][0], "name": "extra"}]}
    assert "extra" in road.refused("echo", extra, "unknown_input")["error"]
    other = {"inputs": [{**good["inputs"][0], "name": "extra"}]}
    road.refused("echo", other, "unknown_input", "missing_input")
    road.refused("echo", {"inputs": []}, "missing_input", "invalid_request")
    twice = {"inputs": [*good["inputs"], *good["inputs"]]}
    road.refused("echo", twice, "duplicate_input")


def test_a6_text_labels_are_the_same_on_every_route(road: Road) -> None:
    rows = [[1.0, 0.0], [0.0, 1.0]]
    wanted = ["crème", "猫🐈"]
    _, answer = road.post("/predict/label", {"data": rows})
    assert answer["prediction"] == wanted
    body = tensor("x", "FP32", rows)
    _, answer = road.infer("label", body)
    assert answer["outputs"][0]["datatype"] == "BYTES" and answer["outputs"][0]["data"] == wanted
    asked = {**body, "parameters": {"binary_data_output": True}}
    _, headers, content = road.send("POST", "/v2/models/label/infer", json.dumps(asked).encode())
    rest = content[int(headers["inference-header-content-length"]) :]
    expected = b"".join(struct.pack("<I", len(label.encode())) + label.encode() for label in wanted)
    assert rest == expected


def test_a7_a_body_that_is_no_utf_8_is_the_callers_mistake(road: Road) -> None:
    junk = base64.b16decode(b"8081FF00")
    for body in (junk, os.urandom(2_000_000)):
        status, answer = road.post("/predict/echo", body)
        assert (status, answer["code"]) == (400, "invalid_json")
    status, answer = road.post("/predict/text", b'{"data": ["\\ud800"]}')
    assert status == 400


@pytest.mark.parametrize(
    "body",
    [
        b'{"data": ' + b"[" * 250_000 + b"]" * 250_000 + b"}",
        b'{"data": [[1,2,3]], "extra": ' + b"[" * 250_000 + b"]" * 250_000 + b"}",
    ],
)
def test_a8_deep_nesting_is_refused_before_anything_is_published(road: Road, body: bytes) -> None:
    headers = {"Prefer": "respond-async"} if road.is_long else {}
    status, answer = road.post("/predict/echo", body, **headers)
    assert (status, answer["code"]) == (400, "invalid_json")
    assert road.post("/predict/echo", {"data": [[1, 2, 3]]})[0] == 200


def test_a34_what_is_too_large_is_refused_at_the_door_with_limit_and_size(road: Road) -> None:
    status, headers, content = road.send("POST", "/predict/echo", b"", {"Content-Length": str(10**12)})
    answer = strict(content)
    assert (status, answer["code"]) == (413, "too_large")
    assert 10**12 in answer["details"].values(), answer
    assert any(limit < 10**12 for limit in answer["details"].values() if isinstance(limit, int))
    assert "location" not in headers


def test_a38_one_key_means_one_message(long_road: Road) -> None:
    body = {"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}]}
    reordered = b'{"inputs": [{"data": [[1.0, 2, 3]], "datatype": "FP32", "shape": [1, 3], "name": "x"}]}'
    _, first = long_road.infer("neg", body, Prefer="respond-async", Idempotency_Key="K")
    _, again = long_road.infer("neg", reordered, Prefer="respond-async", Idempotency_Key='"K"')
    assert first["id"] == again["id"]
    _, same_by_another_route = long_road.post(
        "/predict/neg", {"data": [[1, 2, 3]]}, Prefer="respond-async", Idempotency_Key="K"
    )
    assert same_by_another_route["id"] == first["id"]
    status, other = long_road.infer(
        "neg", tensor("x", "FP32", [[9, 9, 9]]), Prefer="respond-async", Idempotency_Key="K"
    )
    assert (status, other["code"]) == (422, "idempotency_conflict")
    # Also when the result is there long since.
    long_road.send("GET", f"/requests/{first['id']}?wait=20")
    _, later = long_road.infer("neg", body, Prefer="respond-async", Idempotency_Key="K")
    assert later["id"] == first["id"]


def test_a38_fifty_at_once_under_one_key_make_one_message(long_road: Road) -> None:
    body = tensor("x", "FP32", [[4, 5, 6]])
    with concurrent.futures.ThreadPoolExecutor(50) as pool:
        calls = [
            pool.submit(long_road.infer, "neg", body, Prefer="respond-async", Idempotency_Key="K2") for _ in range(50)
        ]
        answers = [call.result() for call in calls]
    assert {status for status, _ in answers} == {202}
    assert len({answer["id"] for _, answer in answers}) == 1


def test_a38_a_refusal_is_not_pinned_to_its_key(long_road: Road) -> None:
    wrong = tensor("x", "FP32", [[1, 2]])
    assert long_road.infer("neg", wrong, Prefer="respond-async", Idempotency_Key="K3")[0] == 400
    right = tensor("x", "FP32", [[1, 2, 3]])
    assert long_road.infer("neg", right, Prefer="respond-async", Idempotency_Key="K3")[0] == 202


@pytest.mark.parametrize("key", ["", "a" * 300, "two\twords", '"unclosed'])
def test_a38_an_unusable_key_is_refused(long_road: Road, key: str) -> None:
    body = tensor("x", "FP32", [[1, 2, 3]])
    assert long_road.infer("neg", body, Prefer="respond-async", Idempotency_Key=key)[0] == 400


def test_the_same_wrong_shape_is_the_same_error_on_both_roads(short_road: Road, long_road: Road) -> None:
    answers = [road.infer("echo", tensor("x", "FP32", [[1, 2]])) for road in (short_road, long_road)]
    for _, answer in answers:
        answer.pop("request_id")
    assert answers[0] == answers[1]
    assert answers[0][1] == {
        "error": answers[0][1]["error"],
        "code": "shape_mismatch",
        "details": {"input": "x", "expected": [-1, 3], "actual": [1, 2]},
        "status": 400,
    }


def test_what_a_caller_typed_wrong_is_told_by_name(short_road: Road) -> None:
    status, answer = short_road.post("/predict/echo", {"inputs": [[1, 2, 3]]})
    assert status == 400
    assert "data" in answer["error"] and "inputs" in answer["error"]
    status, answer = short_road.post("/predict", {"data": [[1, 2, 3]]})
    assert status == 400
    assert all(name in answer["error"] or name in json.dumps(answer["details"]) for name in NAMES)


def test_no_answer_holds_a_path_of_this_machine(road: Road, tmp_path: Path) -> None:
    for path in ("/predict/nobody", "/v2/models/..%2f..%2fetc/infer", "/v2/models/echo/versions/9/infer", "/x"):
        status, _, content = road.send("POST", path, b"{}", {"Content-Type": "application/json"})
        assert status in (400, 404)
        assert b"/home" not in content and b"/usr" not in content and str(Path.cwd()).encode() not in content
