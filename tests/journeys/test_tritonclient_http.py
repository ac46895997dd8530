"""tritonclient over HTTP, unchanged, sync and asyncio, against `headrace serve` in a process of its own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from journeys.served import DATATYPES, Served, every_datatype, served

httpclient = pytest.importorskip("tritonclient.http", reason="pip install 'tritonclient[http]'")
aioclient = pytest.importorskip("tritonclient.http.aio", reason="pip install 'tritonclient[http]'")
InferenceServerException = pytest.importorskip("tritonclient.utils").InferenceServerException

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("triton")
    shutil.copy(DATA / "iris_logreg.onnx", folder / "iris.onnx")
    for version in ("1", "2"):
        (folder / "many" / version).mkdir(parents=True)
        shutil.copy(DATA / "iris_logreg.onnx", folder / "many" / version / "model.onnx")
    with served(folder, "iris.onnx", "many", *every_datatype(folder), admin=True) as one:
        yield one


@pytest.fixture
def client(server: Served) -> Iterator[Any]:
    with httpclient.InferenceServerClient(server.address) as one:
        yield one


_KINDS = {"BOOL": "?", "FP16": "f2", "FP32": "f4", "FP64": "f8"}


def extremes(datatype: str) -> Any:
    """Return [n,2] values at the ends of what a datatype can hold."""
    if datatype == "BYTES":
        return np.array([[b"", b"a"], ["crème 猫".encode(), b"x" * 5000]], dtype=np.object_)
    if datatype == "BOOL":
        return np.array([[True, False], [False, False]])
    if datatype == "BF16":
        return np.array([[1.0, -0.0], [2.0**-126, 3.3895313892515355e38]], dtype=ml_dtypes.bfloat16)
    if datatype.startswith("FP"):
        kind = np.dtype(_KINDS[datatype])
        limits = np.finfo(kind)
        return np.array([[limits.max, limits.min], [limits.tiny, -0.0], [limits.smallest_subnormal, 0.1]], dtype=kind)
    kind = np.dtype(datatype.lower())
    return np.array([[np.iinfo(kind).min, np.iinfo(kind).max], [0, 1]], dtype=kind)


def asked(module: Any, datatype: str, values: Any, *, binary_in: bool, binary_out: bool) -> tuple[list[Any], list[Any]]:
    one = module.InferInput("x", list(values.shape), datatype)
    one.set_data_from_numpy(values, binary_data=binary_in)
    return [one], [module.InferRequestedOutput("y", binary_data=binary_out)]


def same(answer: Any, values: Any) -> None:
    found = answer.as_numpy("y")
    if values.dtype == np.object_:
        plain = [[item.encode() if isinstance(item, str) else item for item in row] for row in found.tolist()]
        assert plain == values.tolist()
        return
    assert found.astype(values.dtype).tobytes() == values.tobytes()


#: The client itself refuses BF16 as JSON.
FORMS = [(d, i, o) for d in DATATYPES for i in (True, False) for o in (True, False) if d != "BF16" or (i and o)]


@pytest.mark.parametrize(("datatype", "binary_in", "binary_out"), FORMS)
def test_every_datatype_is_bit_exact_in_every_form(
    client: Any, datatype: str, binary_in: bool, binary_out: bool
) -> None:
    values = extremes(datatype)
    inputs, outputs = asked(httpclient, datatype, values, binary_in=binary_in, binary_out=binary_out)
    same(client.infer(datatype.lower(), inputs, outputs=outputs, request_id="r1"), values)


@pytest.mark.parametrize(("datatype", "binary_in", "binary_out"), FORMS)
async def test_every_datatype_is_bit_exact_through_the_asyncio_client(
    server: Served, datatype: str, binary_in: bool, binary_out: bool
) -> None:
    values = extremes(datatype)
    inputs, outputs = asked(aioclient, datatype, values, binary_in=binary_in, binary_out=binary_out)
    async with aioclient.InferenceServerClient(server.address) as client:
        same(await client.infer(datatype.lower(), inputs, outputs=outputs), values)


@pytest.mark.parametrize("name", ["gzip", "deflate"])
@pytest.mark.parametrize("binary", [True, False])
async def test_compression_both_ways(server: Served, client: Any, name: str, binary: bool) -> None:
    values = np.arange(4000, dtype=np.int64).reshape(-1, 2)
    more = {"request_compression_algorithm": name, "response_compression_algorithm": name}
    inputs, outputs = asked(httpclient, "INT64", values, binary_in=binary, binary_out=binary)
    answer = client.infer("int64", inputs, outputs=outputs, **more)
    same(answer, values)
    inputs, outputs = asked(aioclient, "INT64", values, binary_in=binary, binary_out=binary)
    async with aioclient.InferenceServerClient(server.address) as other:
        same(await other.infer("int64", inputs, outputs=outputs, **more), values)


def test_the_default_request_and_everything_at_once(client: Any) -> None:
    values = np.array([[1, 2]], dtype=np.float32)
    inputs, _ = asked(httpclient, "FP32", values, binary_in=True, binary_out=True)
    same(client.infer("fp32", inputs), values)
    answer = client.infer(
        "fp32", inputs, request_id="r2", priority=3, timeout=5_000_000, parameters={"k": "v"}, query_params={"q": 1}
    )
    assert answer.get_response()["id"] == "r2"
    same(client.async_infer("fp32", inputs).get_result(), values)


def test_health_and_metadata(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("iris")
    assert client.is_model_ready("many", "2")
    assert not client.is_model_ready("many", "3")
    assert {"binary_tensor_data", "statistics"} <= set(client.get_server_metadata()["extensions"])
    assert client.get_model_metadata("many")["versions"] == ["1", "2"]
    config = client.get_model_config("fp16")
    assert config["max_batch_size"] == 64
    assert config["input"] == [{"name": "x", "data_type": "TYPE_FP16", "dims": [2]}]
    assert {one["name"] for one in client.get_model_repository_index()} >= {"iris", "bytes"}


def test_statistics_count_what_was_done(client: Any) -> None:
    def stats() -> Any:
        (found,) = client.get_inference_statistics("uint16", "1")["model_stats"]
        return found

    before = stats()
    for _ in range(3):
        inputs, outputs = asked(httpclient, "UINT16", np.ones((5, 2), dtype=np.uint16), binary_in=True, binary_out=True)
        client.infer("uint16", inputs, outputs=outputs)
    after = stats()
    assert after["inference_count"] - before["inference_count"] == 15
    assert after["execution_count"] - before["execution_count"] == 3
    assert after["inference_stats"]["success"]["count"] - before["inference_stats"]["success"]["count"] == 3
    assert after["inference_stats"]["compute_infer"]["ns"] > before["inference_stats"]["compute_infer"]["ns"]
    assert after["last_inference"] > 1_700_000_000_000
    assert len(client.get_inference_statistics()["model_stats"]) == len(DATATYPES) + 3


@pytest.mark.parametrize(
    ("model", "datatype", "shape", "status"),
    [("none", "FP32", (1, 2), "404"), ("fp32", "FP64", (1, 2), "400"), ("fp32", "FP32", (1, 3), "400")],
)
def test_errors_are_read_by_the_client(
    client: Any, model: str, datatype: str, shape: tuple[int, ...], status: str
) -> None:
    values = np.ones(shape, dtype=_KINDS[datatype])
    inputs, outputs = asked(httpclient, datatype, values, binary_in=True, binary_out=True)
    with pytest.raises(InferenceServerException) as caught:
        client.infer(model, inputs, outputs=outputs)
    assert caught.value.status() == status
    assert caught.value.message()


def test_models_are_loaded_and_unloaded_on_the_admin_listener_only(server: Served, client: Any) -> None:
    with pytest.raises(InferenceServerException, match="admin listener") as caught:
        client.unload_model("many")
    assert caught.value.status() == "403"
    with httpclient.InferenceServerClient(f"127.0.0.1:{server.admin_port}") as admin:
        admin.unload_model("many")
        assert not client.is_model_ready("many")
        assert "many" not in {one["name"] for one in admin.get_model_repository_index()}
        admin.load_model("many")
        assert client.is_model_ready("many", "2")
        with pytest.raises(InferenceServerException):
            admin.load_model("many", config='{"max_batch_size":8}')
        with pytest.raises(InferenceServerException):
            admin.load_model("elsewhere")


async def test_a_reload_fails_no_request(server: Served) -> None:
    """Requests go on and on while a model is loaded again; every one of them is answered."""
    import asyncio

    row = np.array([[5.1, 3.5, 1.4, 0.2]], dtype=np.float32)
    inputs = [aioclient.InferInput("X", [1, 4], "FP32").set_data_from_numpy(row)]
    over = asyncio.Event()
    answered = 0

    async def caller() -> None:
        nonlocal answered
        async with aioclient.InferenceServerClient(server.address) as client:
            while not over.is_set():
                await client.infer("iris", inputs)
                answered += 1

    callers = [asyncio.create_task(caller()) for _ in range(4)]
    async with aioclient.InferenceServerClient(f"127.0.0.1:{server.admin_port}") as admin:
        for _ in range(3):
            await admin.load_model("iris")
    over.set()
    await asyncio.gather(*callers)
    assert answered > 0
