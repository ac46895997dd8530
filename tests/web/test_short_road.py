"""The same routes over the real short road: registry, host, batcher and predictor behind them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headrace.clock import SystemClock
from headrace.models.batcher import BatchSettings
from headrace.models.host import ModelHost, ModelSettings
from headrace.models.predictor import Predictor
from headrace.models.registry import resolve
from headrace.services.short import ShortRoad
from headrace.telemetry.logs import Logs
from headrace.telemetry.metrics import Metrics
from web.kit import Lines, World, ask, world

DATA = Path(__file__).parents[1] / "data"
LENGTH = "inference-header-content-length"


@contextlib.asynccontextmanager
async def short_road(*specs: str, load: bool = True, **settings: Any) -> AsyncIterator[World]:
    """Models by name from `headrace.testing.models`, or files, served for real."""
    clock = SystemClock()
    lines = Lines()
    host = ModelHost(
        settings=ModelSettings(threads=1, **settings),
        batch=BatchSettings(),
        clock=clock,
        metrics=Metrics(clock, instance="models"),
        logs=Logs(clock, service="models", writer=lines),  # type: ignore[arg-type]
    )
    found = resolve(
        [spec if "." in spec else f"python:headrace.testing.models:{spec}" for spec in specs], model_path=DATA
    )
    assert not found.faults
    predictor = Predictor(host)
    if load:
        await host.load(found.artifacts)
    try:
        yield world(ShortRoad(predictor))  # type: ignore[arg-type]
    finally:
        await predictor.close()


async def infer(here: World, model: str, datatype: str, shape: list[int], data: Any, **more: Any) -> Any:
    body = {"inputs": [{"name": "x", "datatype": datatype, "shape": shape, "data": data}], **more}
    return await ask(here.app, "POST", f"/v2/models/{model}/infer", json.dumps(body).encode())


async def test_a_real_model_predicts_over_both_routes() -> None:
    async with short_road("iris_logreg.onnx") as here:
        setosa = [[5.1, 3.5, 1.4, 0.2], [6.3, 3.3, 6.0, 2.5]]
        reply = await here.predict(setosa)
        prediction = reply.json()["prediction"]
        assert prediction["label"] == [0, 2]
        assert [round(sum(row), 3) for row in prediction["probabilities"]] == [1.0, 1.0]
        assert reply.headers["x-model-version"] == "1"
        (line,) = here.lines.all()
        assert line["queue_time_ms"] is not None
        body = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [2, 4], "data": setosa}]}
        body["outputs"] = [{"name": "label"}]
        reply = await ask(here.app, "POST", "/v2/models/iris_logreg/infer", json.dumps(body).encode())
        assert reply.json()["outputs"] == [{"name": "label", "datatype": "INT64", "shape": [2], "data": [0, 2]}]
        metadata = (await here.ask("GET", "/v2/models/iris_logreg")).json()
        assert metadata["platform"] == "onnx_onnxv1"
        health = (await here.ask("GET", "/health")).json()
        assert health["status"] == "ok"
        assert health["last_updated"].startswith("20")


async def test_a1_nan_and_infinity_in_outputs_are_null_in_json_and_exact_in_binary() -> None:
    async with short_road("div") as here:
        assert (await here.predict([[1.0, 0.0, -1.0]])).json()["prediction"] == [[None, None, None]]
        reply = await infer(here, "div", "FP32", [1, 3], [1, 0, -1])
        assert reply.json()["outputs"][0]["data"] == [None, None, None]
        reply = await infer(here, "div", "FP32", [1, 3], [1, 0, -1], parameters={"binary_data_output": True})
        first, second, third = struct.unpack("<3f", reply.body[int(reply.headers[LENGTH]) :])
        assert (first, third) == (float("inf"), float("-inf"))
        assert second != second


async def test_a2_whole_numbers_are_exact() -> None:
    async with short_road("echo64", "ids") as here:
        good = [9007199254740993, -9223372036854775808]
        assert (await here.predict(good, path="/predict/echo64")).json()["prediction"] == good
        assert (await infer(here, "echo64", "INT64", [2], good)).json()["outputs"][0]["data"] == good
        most = [18446744073709551615]
        assert (await infer(here, "ids", "UINT64", [1], most)).json()["outputs"][0]["data"] == most
        for bad in (9223372036854775808, 1.5, True, "7"):
            reply = await infer(here, "echo64", "INT64", [1], [bad])
            assert (reply.status, reply.json()["code"]) == (400, "invalid_value")


async def test_a6_string_labels_answer_every_route() -> None:
    labels = ["crème", "猫🐈"]
    async with short_road("label") as here:
        assert (await here.predict([[1, 0], [0, 1]])).json()["prediction"] == labels
        reply = await infer(here, "label", "FP32", [2, 2], [1, 0, 0, 1])
        output = reply.json()["outputs"][0]
        assert (output["datatype"], output["shape"], output["data"]) == ("BYTES", [2], labels)
        reply = await infer(here, "label", "FP32", [2, 2], [1, 0, 0, 1], parameters={"binary_data_output": True})
        packed = b"".join(struct.pack("<I", len(each.encode())) + each.encode() for each in labels)
        assert reply.body[int(reply.headers[LENGTH]) :] == packed


async def test_a12_one_bad_item_in_a_batch_fails_alone() -> None:
    async with short_road("neg", runner="thread") as here:
        rows = [[float(number)] * 3 for number in range(8)]
        rows[3] = [-1.0, 0.0, 0.0]
        replies = await asyncio.gather(*(here.predict([row]) for row in rows))
        assert [reply.status for reply in replies] == [200, 200, 200, 500, 200, 200, 200, 200]
        assert replies[3].json()["code"] == "model_failed"
        assert b"Traceback" not in replies[3].body
        for row, reply in zip(rows, replies, strict=True):
            if reply.status == 200:
                assert reply.json()["prediction"] == [row]


async def test_a13_every_caller_gets_its_own_rows_and_id() -> None:
    async with short_road("echo", runner="thread") as here:

        async def one(number: int) -> None:
            rows = [[number, row, 0.0] for row in range(1 + number % 5)]
            reply = await here.predict(rows, {"X-Request-Id": f"r{number}"})
            assert reply.json()["prediction"] == rows
            assert reply.json()["request_id"] == f"r{number}"

        for start in range(0, 2000, 200):
            await asyncio.gather(*(one(number) for number in range(start, start + 200)))


async def test_a24_a_failed_model_is_not_ready_everywhere_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "empty.onnx").write_bytes(b"")
    async with short_road("echo", str(tmp_path / "empty.onnx")) as here:
        for path in ("/v2/health/ready", "/health", "/v2/models/empty/ready"):
            reply = await here.ask("GET", path)
            assert (reply.status, reply.json()["code"]) == (503, "not_ready"), path
            assert str(tmp_path) not in reply.body.decode()
        assert (await here.ask("GET", "/v2/health/live")).status == 200
        assert (await here.ask("GET", "/v2/models/echo/ready")).status == 200
        reply = await here.predict([[1, 2, 3]], path="/predict/empty")
        assert (reply.status, reply.json()["code"]) == (503, "model_unavailable")
        assert (await here.predict([[1, 2, 3]], path="/predict/echo")).status == 200
        index = (await here.ask("POST", "/v2/repository/index")).json()
        assert [(each["name"], each["state"]) for each in index] == [("echo", "READY"), ("empty", "UNAVAILABLE")]
        assert index[1]["reason"]


async def test_a24_nothing_loaded_is_not_ready() -> None:
    async with short_road("echo", load=False) as here:
        reply = await here.ask("GET", "/v2/health/ready")
        assert (reply.status, reply.json()["details"]["reasons"]) == (503, ["no model is loaded"])


async def test_a5_the_legal_names_are_told() -> None:
    async with short_road("echo") as here:
        reply = await infer(here, "echo", "FP32", [1, 3], [1, 2, 3], outputs=[{"name": "scores_typo"}])
        assert (reply.status, reply.json()["code"]) == (400, "unknown_output")
        assert reply.json()["details"]["expected"] == ["y"]
        reply = await here.predict([[1, 2, 3]], path="/predict/other")
        assert reply.json()["details"]["expected"] == ["echo"]


async def test_a_deadline_is_kept_while_the_model_runs() -> None:
    async with short_road("slow", runner="thread") as here:
        reply = await here.predict([[0.5]], {"Request-Timeout": "0.05"})
        assert (reply.status, reply.json()["code"]) == (504, "deadline_exceeded")


async def test_a14_callers_that_go_leave_the_batcher_working() -> None:
    async with short_road("slow", runner="thread") as here:
        asking = [asyncio.create_task(here.predict([[0.02]])) for _ in range(50)]
        await asyncio.sleep(0.03)
        for exchange in list(here.app.inflight):
            exchange.stop("gone")
        await asyncio.gather(*asking)
        assert not here.app.inflight
        replies = await asyncio.gather(*(here.predict([[0.0]]) for _ in range(50)))
        assert {reply.status for reply in replies} == {200}


@pytest.mark.parametrize("name", ["..%2fsecret", "%2e%2e%2fsecret", "%2fetc", "echo%00", "CON"])
async def test_a23_strange_names_find_no_model(name: str) -> None:
    async with short_road("echo") as here:
        for path in (f"/predict/{name}", f"/v2/models/{name}/infer"):
            reply = await here.ask("POST", path, b'{"data": [[1, 2, 3]]}')
            assert (reply.status, reply.json()["code"]) == (404, "model_not_found")
            assert b"secret" not in reply.body
