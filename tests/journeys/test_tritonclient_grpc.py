"""tritonclient's gRPC clients, unchanged, against real processes: `serve` on the short road, `up` on the long one."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from journeys.stack import Stack, free_port, tensor, until

MODELS = "python:headrace.testing.models:"

#: A model with one input and output of every datatype; what it returns is what it was given.
EVERY = """
import headrace

TYPES = "BOOL UINT8 UINT16 UINT32 UINT64 INT8 INT16 INT32 INT64 FP16 FP32 FP64 BF16 BYTES".split()

@headrace.model(
    inputs={f"in_{each}": f"{each}[-1,2]" for each in TYPES},
    outputs={f"out_{each}": f"{each}[-1,2]" for each in TYPES},
    concurrent=True,
)
def every(inputs):
    return {f"out_{each}": inputs[f"in_{each}"] for each in TYPES}
"""

NAN_32 = np.array([0x7FC00001, 0xFF800000], np.uint32).view(np.float32)
VALUES: dict[str, Any] = {
    "BOOL": np.array([True, False]),
    "UINT8": np.array([0, 255], np.uint8),
    "UINT16": np.array([1, 65535], np.uint16),
    "UINT32": np.array([1, 2**32 - 1], np.uint32),
    "UINT64": np.array([9007199254740993, 2**64 - 1], np.uint64),
    "INT8": np.array([-128, 127], np.int8),
    "INT16": np.array([-(2**15), 2**15 - 1], np.int16),
    "INT32": np.array([-(2**31), 2**31 - 1], np.int32),
    "INT64": np.array([-(2**63), 9007199254740993], np.int64),
    "FP16": np.array([0x7E01, 0x8000], np.uint16).view(np.float16),
    "FP32": NAN_32,
    "FP64": np.array([0x7FF8000000000001, 0x8000000000000000], np.uint64).view(np.float64),
    "BF16": np.array([0x7FC1, 0xFF80], np.uint16).view(ml_dtypes.bfloat16),
    "BYTES": np.array([b"a\0b\xff", "猫🐈".encode()], dtype=object),
}


class Served:
    """A `headrace serve` with both ports, as its announcement says them."""

    def __init__(self, folder: Path) -> None:
        (folder / "every.py").write_text(EVERY)
        words = ["serve", "python:every:every", *(MODELS + name for name in ("echo", "slow", "neg", "text"))]
        own = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        self.log = folder / "serve.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "headrace", *words, "--port", "0", "--grpc-port", "0"],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=folder,
                env={**own, "HEADRACE_WEB_BODY_BYTES_MAX": str(8 << 20)},
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.match(r"Ready at (http://\S+) and grpc://(\S+) ", line)
        assert found, (line, self.log.read_text()[-2000:])
        self.url, self.address = found.groups()

    def lines(self, event: str = "request") -> list[dict[str, Any]]:
        found = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in found if line["event"] == event]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served(tmp_path_factory.mktemp("serve"))
    yield server
    server.process.send_signal(signal.SIGTERM)
    try:
        assert server.process.wait(20) == 0
    finally:
        server.process.kill()
        server.process.communicate()


@pytest.fixture
def client(served: Served) -> Iterator[Any]:
    with triton.InferenceServerClient(served.address) as found:
        yield found


@contextlib.asynccontextmanager
async def aio_client(served: Served) -> AsyncIterator[Any]:
    async with triton_aio.InferenceServerClient(served.address) as found:
        yield found


def given(name: str, values: Any, module: Any = triton) -> Any:
    found = module.InferInput(name, list(values.shape), np_to_triton_dtype(values.dtype))
    found.set_data_from_numpy(values)
    return found


def every_input() -> list[Any]:
    return [given(f"in_{name}", values.reshape(1, 2)) for name, values in VALUES.items()]


def same_bits(found: Any, wanted: Any) -> bool:
    if wanted.dtype == object:
        return bool(found.ravel().tolist() == wanted.ravel().tolist())
    return bool(found.dtype == wanted.dtype and found.tobytes() == wanted.tobytes())


X = np.array([[1, 2, 3]], np.float32)


# -- what it is -----------------------------------------------------------------------------------------------------


def test_live_ready_metadata_config_statistics_and_index(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("echo")
    assert client.is_model_ready("echo", "1")
    assert not client.is_model_ready("nobody")
    server = client.get_server_metadata(as_json=True)
    assert server["name"] == "headrace"
    metadata = client.get_model_metadata("every", as_json=True)
    assert [each["datatype"] for each in metadata["inputs"]] == list(VALUES)
    assert metadata["inputs"][0]["shape"] == ["-1", "2"]
    config = client.get_model_config("every").config
    assert [each.data_type for each in config.input] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 13]
    assert config.max_batch_size > 0
    assert list(config.input[0].dims) == [2]
    before = client.get_inference_statistics("echo").model_stats[0].inference_count
    client.infer("echo", [given("x", X)])
    after = client.get_inference_statistics("echo", "1").model_stats[0]
    assert after.inference_count == before + 1
    assert after.inference_stats.success.ns > 0
    index = client.get_model_repository_index()
    assert sorted((each.name, each.state) for each in index.models) == [
        (name, "READY") for name in ("echo", "every", "neg", "slow", "text")
    ]


def test_loading_and_the_rest_are_refused_with_their_status(client: Any) -> None:
    for call, status in (
        (partial(client.load_model, "echo"), "PERMISSION_DENIED"),
        (partial(client.unload_model, "echo"), "PERMISSION_DENIED"),
        (client.get_system_shared_memory_status, "UNIMPLEMENTED"),
        (client.get_cuda_shared_memory_status, "UNIMPLEMENTED"),
        (client.get_trace_settings, "UNIMPLEMENTED"),
        (client.get_log_settings, "UNIMPLEMENTED"),
    ):
        with pytest.raises(InferenceServerException) as caught:
            call()
        assert caught.value.status() == f"StatusCode.{status}"
    assert client.is_model_ready("echo")


# -- inference ------------------------------------------------------------------------------------------------------


def test_every_datatype_goes_there_and_back_bit_for_bit(client: Any) -> None:
    found = client.infer("every", every_input(), request_id="mine", model_version="1")
    response = found.get_response()
    assert (response.id, response.model_name, response.model_version) == ("mine", "every", "1")
    for name, values in VALUES.items():
        output = found.as_numpy(f"out_{name}")
        assert output.shape == (1, 2)
        assert same_bits(output, values), name


def test_outputs_are_those_asked_for_in_their_order(client: Any) -> None:
    asked = [triton.InferRequestedOutput(f"out_{name}") for name in ("BYTES", "INT8")]
    found = client.infer("every", every_input(), outputs=asked).get_response()
    assert [output.name for output in found.outputs] == ["out_BYTES", "out_INT8"]


def test_parameters_sequences_and_priorities_are_no_trouble(client: Any) -> None:
    found = client.infer(
        "echo",
        [given("x", X)],
        sequence_id=7,
        sequence_start=True,
        priority=1,
        timeout=5_000_000,
        parameters={"a": 0.5},
    )
    assert same_bits(found.as_numpy("y"), X)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compression(client: Any, algorithm: str) -> None:
    many = np.tile(X, (1000, 1))
    assert same_bits(client.infer("echo", [given("x", many)], compression_algorithm=algorithm).as_numpy("y"), many)


def test_an_empty_tensor_is_a_tensor(client: Any) -> None:
    found = client.infer("text", [given("x", np.array([], dtype=object))])
    assert found.as_numpy("y").shape == (0,)


@pytest.mark.parametrize(
    ("model", "name", "values", "status", "word"),
    [
        ("echo", "x", np.zeros((1, 4), np.float32), "INVALID_ARGUMENT", "shape"),
        ("echo", "x", np.zeros((1, 3), np.int32), "INVALID_ARGUMENT", "FP32"),
        ("echo", "z", np.zeros((1, 3), np.float32), "INVALID_ARGUMENT", "'z'"),
        ("nobody", "x", np.zeros((1, 3), np.float32), "NOT_FOUND", "model"),
        ("neg", "x", np.full((1, 3), -1, np.float32), "INTERNAL", "negative"),
        ("echo", "x", np.zeros((800_000, 3), np.float32), "RESOURCE_EXHAUSTED", str(8 << 20)),
    ],
)
def test_a_bad_request_is_an_exception_with_its_status(
    client: Any, model: str, name: str, values: Any, status: str, word: str
) -> None:
    with pytest.raises(InferenceServerException) as caught:
        client.infer(model, [given(name, values)])
    assert caught.value.status() == f"StatusCode.{status}"
    assert word.lower() in caught.value.message().lower()
    assert same_bits(client.infer("echo", [given("x", X)]).as_numpy("y"), X)


def test_a_deadline_ends_the_wait(client: Any, served: Served) -> None:
    with pytest.raises(InferenceServerException) as caught:
        client.infer("slow", [given("x", np.array([[2.0]], np.float32))], client_timeout=0.2)
    assert caught.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    assert same_bits(client.infer("echo", [given("x", X)]).as_numpy("y"), X)


def test_asynchronous_calls_end_with_a_result_or_as_cancelled(client: Any) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()

    def take(result: Any, error: Any) -> None:
        answers.put((result, error))

    client.async_infer("echo", [given("x", X)], take)
    result, error = answers.get(timeout=20)
    assert error is None and same_bits(result.as_numpy("y"), X)
    call = client.async_infer("slow", [given("x", np.array([[3.0]], np.float32))], take)
    call.cancel()
    result, error = answers.get(timeout=20)
    assert result is None and error.status() == "StatusCode.CANCELLED"


def test_a_stream_answers_in_order_of_completion_and_tells_errors(client: Any) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    slow = np.array([[0.5]], np.float32)
    client.async_stream_infer("slow", [given("x", slow)], request_id="slow")
    client.async_stream_infer("echo", [given("x", np.zeros((1, 4), np.float32))], request_id="bad")
    result, error = answers.get(timeout=20)
    assert result is None and "[1, 4]" in error.message()
    client.async_stream_infer("echo", [given("x", X)], request_id="fast")
    ids = []
    for _ in range(2):
        result, error = answers.get(timeout=20)
        assert error is None
        ids.append(result.get_response().id)
    assert ids == ["fast", "slow"]
    client.stop_stream()
    assert answers.empty()


def test_many_threads_get_their_own_answers(served: Served) -> None:
    faults: list[str] = []

    def ask(first: int) -> None:
        with triton.InferenceServerClient(served.address) as own:
            for number in range(first, first + 60):
                wanted = np.full((number % 5 + 1, 3), number, np.float32)
                found = own.infer("echo", [given("x", wanted)], request_id=str(number))
                if found.get_response().id != str(number) or not same_bits(found.as_numpy("y"), wanted):
                    faults.append(f"{number} got another's answer")

    threads = [threading.Thread(target=ask, args=(1000 * each,)) for each in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not faults


# -- asyncio --------------------------------------------------------------------------------------------------------


async def test_the_asyncio_client_does_the_same(served: Served) -> None:
    async with aio_client(served) as client:
        assert await client.is_server_live()
        assert await client.is_server_ready()
        assert (await client.get_model_metadata("echo")).platform == "python"
        assert (await client.get_model_config("echo")).config.name == "echo"
        assert (await client.get_inference_statistics("echo")).model_stats[0].name == "echo"
        assert len((await client.get_model_repository_index()).models) == 5
        found = await client.infer("every", every_input())
        assert all(same_bits(found.as_numpy(f"out_{name}"), values) for name, values in VALUES.items())
        with pytest.raises(InferenceServerException) as caught:
            await client.infer("echo", [given("x", np.zeros((1, 4), np.float32))])
        assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
        with pytest.raises(InferenceServerException) as caught:
            await client.infer("slow", [given("x", np.array([[2.0]], np.float32))], client_timeout=0.2)
        assert caught.value.status() == "StatusCode.DEADLINE_EXCEEDED"


async def test_the_asyncio_client_streams(served: Served) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for number in range(20):
            values = np.full((1, 3), number, np.float32)
            yield {"model_name": "echo", "inputs": [given("x", values)], "request_id": str(number)}

    async with aio_client(served) as client:
        seen = set()
        async for result, error in client.stream_infer(requests()):
            assert error is None
            number = int(result.get_response().id)
            assert same_bits(result.as_numpy("y"), np.full((1, 3), number, np.float32))
            seen.add(number)
        assert seen == set(range(20))


# -- both protocols are one service ---------------------------------------------------------------------------------


async def test_both_protocols_share_log_metrics_and_answers(served: Served, client: Any) -> None:
    client.infer("echo", [given("x", X)], headers={"x-request-id": "over-grpc"})
    line = await until(
        lambda: [line for line in served.lines() if line["request_id"] == "over-grpc"], "the line of the call"
    )
    wanted = {"model": "echo", "status": 200, "route": "/inference.GRPCInferenceService/ModelInfer"}
    assert wanted.items() <= line[0].items()
    async with aiohttp.ClientSession(served.url) as http:
        async with http.post("/v2/models/echo/infer", json=tensor("x", "FP32", X.tolist())) as answer:
            assert (await answer.json())["outputs"][0]["data"] == [1, 2, 3]
        async with http.get("/metrics") as answer:
            assert 'route="/inference.GRPCInferenceService/ModelInfer",status="200"' in await answer.text()


# -- the long road --------------------------------------------------------------------------------------------------


async def test_the_long_road_waits_like_a_plain_call_and_one_key_is_one_message(
    new_stack: Callable[..., Stack], tmp_path: Path
) -> None:
    port = free_port()
    stack = new_stack(MODELS + "echo", MODELS + "slow", flags=("--grpc-port", str(port)))
    stack.start()
    await stack.ready()
    await until(lambda: f"grpc://127.0.0.1:{port}" in stack.log(), "announced")
    async with triton_aio.InferenceServerClient(f"127.0.0.1:{port}") as client, stack.http() as http:
        assert await client.is_server_ready()
        key = {"idempotency-key": "k-1"}
        found = await client.infer("echo", [given("x", X)], request_id="mine", headers=key)
        assert same_bits(found.as_numpy("y"), X)
        assert found.get_response().id == "mine"
        # The same key and the same tensors over HTTP are the same message.
        async with http.post(
            "/v2/models/echo/infer", json=tensor("x", "FP32", X.tolist()), headers={"Idempotency-Key": "k-1"}
        ) as answer:
            assert answer.status == 200
            location = answer.headers["Location"]
        with pytest.raises(InferenceServerException) as caught:
            await client.infer("echo", [given("x", X + 1)], headers=key)
        assert caught.value.status() == "StatusCode.FAILED_PRECONDITION"
        asked = await client.infer("echo", [given("x", X)], headers={**key, "prefer": "respond-async"})
        assert asked.get_response().parameters["location"].string_param == location
        later = await client.infer(
            "slow", [given("x", np.array([[0.3]], np.float32))], headers={"prefer": "respond-async"}
        )
        id = later.get_response().parameters["location"].string_param.removeprefix("/requests/")
        assert (await stack.result(http, id))["status"] == "succeeded"
        with pytest.raises(InferenceServerException) as caught:
            await client.infer("echo", [given("x", np.zeros((1, 4), np.float32))])
        assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
        results, _ = await stack.pull(http)
        assert len(results) == 2
    # Wherever ingest comes back, its callers find it.
    stack.kill("ingest")
    async with triton_aio.InferenceServerClient(f"127.0.0.1:{port}") as client:

        async def answered() -> bool:
            with contextlib.suppress(InferenceServerException):
                return bool(await client.is_server_ready())
            return False

        await until(answered, "ready again")
        assert same_bits((await client.infer("echo", [given("x", X)])).as_numpy("y"), X)
    assert await stack.stop() == 0


# -- starting -------------------------------------------------------------------------------------------------------


def headrace(folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headrace", *words],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, **environ},
        timeout=40,
    )


@pytest.mark.parametrize("command", ["serve", "up"])
def test_without_the_libraries_the_install_line_is_told(tmp_path: Path, command: str) -> None:
    (tmp_path / "grpc.py").write_text("raise ModuleNotFoundError(\"No module named 'grpc'\")\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = headrace(tmp_path, command, MODELS + "echo", "--port", str(free_port()), "--grpc-port", "0", PYTHONPATH=path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("gRPC is not installed; run: pip install 'headrace[grpc]'")
    checked = headrace(tmp_path, "check", HEADRACE_GRPC_PORT="0", PYTHONPATH=path)
    assert checked.returncode == 1
    assert "pip install 'headrace[grpc]'" in checked.stdout + checked.stderr


@pytest.mark.parametrize("command", ["serve", "up"])
def test_a_port_that_is_taken_is_named(tmp_path: Path, command: str) -> None:
    with socket_on_loopback() as port:
        done = headrace(tmp_path, command, MODELS + "echo", "--port", str(free_port()), HEADRACE_GRPC_PORT=str(port))
    assert done.returncode == 1
    assert f"127.0.0.1:{port}: address already in use" in done.stderr.splitlines()[-1]


@contextlib.contextmanager
def socket_on_loopback() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield int(taken.getsockname()[1])


def test_a_second_server_cannot_share_the_port(tmp_path: Path, served: Served) -> None:
    port = served.address.rpartition(":")[2]
    done = headrace(tmp_path, "serve", MODELS + "echo", "--port", str(free_port()), "--grpc-port", port)
    assert done.returncode == 1
    assert f"127.0.0.1:{port}: address already in use" in done.stderr.splitlines()[-1]


def test_no_grpc_is_bound_unless_it_is_asked_for(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace", "serve", MODELS + "echo", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    try:
        assert process.stdout is not None
        assert "grpc://" not in process.stdout.readline()
    finally:
        process.kill()
        _, log = process.communicate()
    assert "grpc://" not in log


def test_one_sigterm_ends_both_listeners_in_order(tmp_path: Path) -> None:
    server = Served(tmp_path)
    try:
        with grpc.insecure_channel(server.address) as channel:
            grpc.channel_ready_future(channel).result(20)
            with triton.InferenceServerClient(server.address) as client:
                answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
                client.async_infer(
                    "slow",
                    [given("x", np.array([[1.0]], np.float32))],
                    lambda result, error: answers.put((result, error)),
                )
                # The call has arrived once the server counts it among those in progress.
                wait_for_in_flight(server)
                server.process.send_signal(signal.SIGTERM)
                result, error = answers.get(timeout=20)
                assert error is None and result.as_numpy("y").tolist() == [[1.0]]
        assert server.process.wait(20) == 0
    finally:
        server.process.kill()
        server.process.communicate()


def wait_for_in_flight(server: Served) -> None:
    for _ in range(2000):
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as answer:
            found = re.search(r"^headrace_http_in_flight\S* (\S+)$", answer.read().decode(), re.M)
        # One is the look itself.
        if found and float(found[1]) >= 2:
            return
    raise AssertionError("the call never arrived")
