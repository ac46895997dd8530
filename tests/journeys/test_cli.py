"""The real command line in its own process: what it prints, where, and its exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from headrace import __version__
from journeys.stack import Receiver, Stack, free_port, tensor, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

DATA = Path(__file__).parents[1] / "data"
IRIS = str(DATA / "iris_logreg.onnx")
NEG = "neg=python:headrace.testing.models:neg"
ROW = [[5.1, 3.5, 1.4, 0.2]]
NewStack = Callable[..., Stack]


class Cli:
    """Runs commands in a folder of the test's own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        return subprocess.run(
            [sys.executable, "-m", "headrace", *words],
            capture_output=True,
            text=True,
            cwd=self.folder,
            env={**own, **environ},
            timeout=60,
        )

    def file(self, name: str, value: Any) -> str:
        (self.folder / name).write_text(json.dumps(value))
        return name


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)


def object_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return stdout, which has to be one JSON object on one line."""
    assert done.stdout.count("\n") == 1, done
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def assert_one_line(done: subprocess.CompletedProcess[str], *words: str, code: int = 1) -> None:
    """The last thing on stderr is one line for people; above it are at most log lines."""
    assert done.returncode == code, done
    last = done.stderr.splitlines()[-1]
    assert last.startswith("headrace: "), done.stderr
    assert not any(line.startswith("Traceback") for line in done.stderr.splitlines())
    for word in words:
        assert word in last


# -- in general -----------------------------------------------------------------------------------------------


def test_help_and_version_need_nothing(cli: Cli) -> None:
    helped = cli("--help")
    assert helped.returncode == 0
    for name in ("serve", "up", "ingest", "inference", "delivery", "predict", "submit", "result", "dead", "check"):
        assert f"  {name} " in helped.stdout
    assert cli("--version").stdout == f"{__version__}\n"


@pytest.mark.parametrize("words", [["nonsense"], ["predict"], ["up"], ["predict", IRIS, "--nonsense"]])
def test_wrong_usage_is_exit_code_2(cli: Cli, words: Sequence[str]) -> None:
    done = cli(*words)
    assert done.returncode == 2
    assert "Usage:" in done.stderr
    assert done.stdout == ""


def test_every_command_and_every_option_says_what_it_is_for() -> None:
    import typer.main

    from headrace.cli import app

    def look(command: Any, path: str) -> list[str]:
        missing = [] if command.help else [path]
        for name, child in getattr(command, "commands", {}).items():
            missing += look(child, f"{path} {name}")
        return missing + [f"{path} {each.name}" for each in command.params if not getattr(each, "help", None)]

    assert look(typer.main.get_command(app), "headrace") == []


def test_every_wrong_setting_is_told_at_once_before_anything_starts(cli: Cli) -> None:
    done = cli("up", IRIS, "--port", "99999", HEADRACE_WORKERS="many", HEADRACE_PROT="1")
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert len(lines) == 3
    assert any("HEADRACE_PROT" in line and "HEADRACE_PORT" in line for line in lines)
    assert not (cli.folder / "data").exists()


# -- predict --------------------------------------------------------------------------------------------------


def test_predict_takes_plain_data_and_prints_a_prediction(cli: Cli) -> None:
    done = cli("predict", IRIS, "-i", cli.file("in.json", {"data": ROW}), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = object_of(done)
    assert found["model"] == "iris_logreg"
    assert found["model_version"] == "1"
    assert found["prediction"]["label"] == [0]


def test_predict_takes_the_open_inference_protocol_and_answers_in_it(cli: Cli) -> None:
    request = {"id": "mine", **tensor("X", "FP32", ROW)}
    found = object_of(cli("predict", f"iris={IRIS}", "-i", cli.file("in.json", request), "--json"))
    assert found["model_name"] == "iris"
    assert found["id"] == "mine"
    assert found["outputs"][0] == {"name": "label", "datatype": "INT64", "shape": [1], "data": [0]}


def test_predict_takes_an_array_as_numpy_saves_it(cli: Cli) -> None:
    np.save(cli.folder / "in.npy", np.array(ROW * 3))
    found = object_of(cli("predict", IRIS, "-i", "in.npy", "--json"))
    assert found["outputs"][0]["data"] == [0, 0, 0]


def test_predict_without_json_prints_for_people_and_still_only_the_answer(cli: Cli) -> None:
    done = cli("predict", IRIS, "-i", cli.file("in.json", {"data": ROW}))
    assert json.loads(done.stdout)["prediction"]["label"] == [0]
    assert done.stderr == ""


def test_predict_says_what_is_wrong_with_the_input(cli: Cli) -> None:
    bad = cli.file("in.json", {"data": [[1.0, 2.0]]})
    assert_one_line(cli("predict", IRIS, "-i", bad), "X")
    found = object_of(cli("predict", IRIS, "-i", bad, "--json"))
    assert found["code"] == "shape_mismatch"
    assert found["details"]["actual"] == [1, 2]


def test_predict_refuses_an_array_that_needs_pickle(cli: Cli) -> None:
    np.save(cli.folder / "in.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    assert_one_line(cli("predict", IRIS, "-i", "in.npy"), "pickle")


@pytest.mark.parametrize(
    ("model", "input", "word"),
    [
        ("missing.onnx", "in.json", "missing.onnx"),
        (IRIS, "missing.json", "missing.json"),
        ("empty.onnx", "in.json", ""),
    ],
)
def test_predict_with_what_is_not_there_says_so_in_one_line(cli: Cli, model: str, input: str, word: str) -> None:
    cli.file("in.json", {"data": ROW})
    (cli.folder / "empty.onnx").write_bytes(b"")
    done = cli("predict", model, "-i", input)
    assert_one_line(done, word)
    assert len(done.stderr.splitlines()) == 1


# -- check and export -----------------------------------------------------------------------------------------


def test_check_finds_every_fault_at_once(cli: Cli) -> None:
    (cli.folder / "empty.onnx").write_bytes(b"")
    words = ("--broker", "carrier-pigeon://loft", "--data", "/proc/nowhere", "--json")
    done = cli("check", "empty.onnx", "missing.onnx", IRIS, *words, HEADRACE_WORKERS="many")
    assert done.returncode == 1
    found = object_of(done)
    assert found["ok"] is False
    faults = {(each["what"], each["state"]) for each in found["findings"]}
    assert {("settings", "fault"), ("broker", "fault"), ("store", "fault"), ("model", "fault")} <= faults
    assert ("model", "ok") in faults, "a good model beside bad ones is said to be good"
    text = " ".join(each["text"] for each in found["findings"])
    assert "carrier-pigeon" in text
    assert "many" in text
    assert "missing.onnx" in text


def test_check_of_what_is_right_exits_with_0_and_says_how_to_get_the_webhook_secret(cli: Cli) -> None:
    done = cli("check", IRIS, "--data", "data")
    assert done.returncode == 0, done.stdout
    assert "--show-secret" in done.stdout
    assert "whsec_" not in done.stdout
    shown = [cli("check", "--data", "data", "--show-secret").stdout for _ in range(2)]
    secrets = [[word for word in each.split() if word.startswith("whsec_")] for each in shown]
    assert len(secrets[0]) == 1
    assert secrets[0] == secrets[1], "it is the same for ever"


def test_check_survives_a_model_that_kills_its_process(cli: Cli) -> None:
    (cli.folder / "killer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    done = cli("check", "python:killer:anything", IRIS, "--json")
    assert done.returncode == 1
    models = [each for each in object_of(done)["findings"] if each["what"] == "model"]
    assert [each["state"] for each in models] == ["ok", "fault"]
    assert "SIGKILL" in models[1]["text"]


def test_export_prints_the_documents(cli: Cli) -> None:
    assert object_of(cli("export", "asyncapi", "--json"))["asyncapi"] == "3.0.0"
    openapi = json.loads(cli("export", "openapi").stdout)
    assert openapi["openapi"].startswith("3.1")
    assert "/v2/models/{model}/infer" in openapi["paths"]
    assert "/metrics" in openapi["paths"]


# -- serve ----------------------------------------------------------------------------------------------------


def start_serve(cli: Cli, port: int, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "headrace", "serve", *words, "--port", str(port)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cli.folder)


async def test_serve_answers_and_stops_in_order(cli: Cli) -> None:
    port = free_port()
    process = start_serve(cli, port, f"iris={IRIS}")
    try:
        assert process.stdout is not None
        assert f"http://127.0.0.1:{port}" in process.stdout.readline()
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
            async with http.get("/v2/health/ready") as answer:
                assert answer.status == 200
            async with http.post("/predict", json={"data": ROW}) as answer:
                assert (await answer.json())["prediction"]["label"] == [0]
        submitted = cli("submit", "iris", "-i", cli.file("in.json", {"data": ROW}), "--url", f"http://127.0.0.1:{port}")
        assert_one_line(submitted, "headrace serve")
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()
    assert not (cli.folder / "data").exists(), "the short road keeps nothing"


def test_serve_with_nothing_that_loads_exits_with_the_reason(cli: Cli) -> None:
    (cli.folder / "empty.onnx").write_bytes(b"")
    assert_one_line(cli("serve", "empty.onnx", "--port", str(free_port())), "empty.onnx")


async def test_serve_goes_on_without_one_broken_model_unless_it_is_told_to_be_strict(cli: Cli) -> None:
    (cli.folder / "empty.onnx").write_bytes(b"")
    port = free_port()
    process = start_serve(cli, port, "empty.onnx", "nowhere.onnx", f"iris={IRIS}")
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("Serving, not ready, at")
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
            async with http.post("/predict/iris", json={"data": ROW}) as answer:
                assert answer.status == 200
            async with http.post("/predict/empty", json={"data": ROW}) as answer:
                assert answer.status == 503
            async with http.get("/v2/health/ready") as answer:
                assert answer.status == 503
                reasons = await answer.text()
                assert "empty" in reasons and "nowhere.onnx" in reasons
    finally:
        process.kill()
        process.communicate()
    strict = cli("serve", "empty.onnx", f"iris={IRIS}", "--strict", "--port", str(free_port()))
    assert_one_line(strict, "empty.onnx")


# -- asking a stack -------------------------------------------------------------------------------------------


def test_a_server_that_is_not_there_is_named(cli: Cli) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert_one_line(cli("result", "0" * 32, "--url", url), url)
    body = cli.file("in.json", {"data": ROW})
    assert_one_line(cli("submit", "neg", "-i", body, "--url", url), url)
    assert_one_line(cli("submit", "neg", "-i", body, "--url", "ftp://x"), "ftp://x")


async def test_submit_and_result_go_the_long_road(cli: Cli, new_stack: NewStack) -> None:
    stack = new_stack(f"iris={IRIS}")
    stack.start()
    await stack.ready()
    np.save(cli.folder / "in.npy", np.array(ROW))
    for file in (
        cli.file("plain.json", {"data": ROW}),
        cli.file("oip.json", tensor("X", "FP32", ROW)),
        "in.npy",
    ):
        submitted = cli("submit", "iris", "-i", file, "--url", stack.url)
        assert submitted.returncode == 0, submitted.stderr
        id, location = submitted.stdout.splitlines()
        assert location == f"{stack.url}/requests/{id}"
        done = cli("result", id, "--wait", "--url", stack.url, "--json")
        assert done.returncode == 0
        found = object_of(done)
        assert found["status"] == "succeeded"
        assert found["result"]["outputs"][0]["data"] == [0]
    first = cli("submit", "iris", "-i", "plain.json", "--key", "k", "--url", stack.url, "--json")
    again = cli("submit", "iris", "-i", "oip.json", "--key", "k", "--url", stack.url, "--json")
    assert object_of(first)["id"] == object_of(again)["id"]
    assert_one_line(cli("submit", "nobody", "-i", "plain.json", "--url", stack.url), "model_not_found")
    assert_one_line(cli("result", "0" * 32, "--url", stack.url), "request_not_found")


async def test_dead_letters_are_listed_shown_and_replayed_while_the_stack_runs(cli: Cli, new_stack: NewStack) -> None:
    stack = new_stack(NEG, HEADRACE_DELIVERY_SCHEDULE_S="0", HEADRACE_DELIVERY_JITTER="0")
    data = str(stack.folder / "data")
    stack.start()
    await stack.ready()
    assert "no dead letters" in cli("dead", "list", "--data", data).stdout
    async with Receiver(stack.history).listening() as receiver, stack.http() as http:
        receiver.status = lambda number: 500 if number == 1 else 200
        id = await stack.submit(http, "neg", tensor("x", "FP32", [[-1.0, 0.0, 1.0]]), destination=receiver.url)
        assert id is not None
        await stack.result(http, id)

        def kinds() -> set[str]:
            listed = object_of(cli("dead", "list", "--data", data, "--json"))["dead"]
            return {each["kind"] for each in listed if each["id"] == id}

        await until(lambda: kinds() == {"message", "delivery"}, "both are dead letters")
        shown = object_of(cli("dead", "show", id, "--data", data, "--json"))
        assert shown["code"] == "model_failed"
        assert shown["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [-1.0, 0.0, 1.0]}]

        due = cli("dead", "replay", id, "--destination", receiver.url, "--data", data)
        assert due.returncode == 0, due.stderr
        await until(lambda: id in receiver.ids, "the delivery came at last")

        replayed = cli("dead", "replay", id, "--data", data)
        assert replayed.returncode == 0, replayed.stderr
        heir = replayed.stdout.strip()
        assert heir != id
        assert (await stack.result(http, heir))["error"]["code"] == "model_failed"
        listed = object_of(cli("dead", "list", "--data", data, "--json"))["dead"]
        assert [each["replayed_as"] for each in listed if each["id"] == id and each["kind"] == "message"] == [heir]
    assert_one_line(cli("dead", "replay", "0" * 32, "--data", data), "0" * 32)
    assert await stack.stop() == 0


def test_dead_letters_of_a_folder_without_a_database_are_not_none(cli: Cli) -> None:
    assert_one_line(cli("dead", "list", "--data", "typo"), "typo")
    assert not (cli.folder / "typo").exists()
