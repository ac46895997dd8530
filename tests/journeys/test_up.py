"""`headrace up` as an operator sees it: how it starts, what it survives, how it refuses, how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from journeys.stack import Stack, free_port, tensor, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

IRIS = f"iris={Path(__file__).parents[1] / 'data' / 'iris_logreg.onnx'}"
NEG = "neg=python:headrace.testing.models:neg"
ROW = tensor("x", "FP32", [[1.0, 2.0, 3.0]])
QUICK = {"HEADRACE_INFERENCE_CLAIM_S": "1"}
NewStack = Callable[..., Stack]

#: A model whose import does what the test wants, each time anew.
MOODY = """
import os, signal, threading
from pathlib import Path
from headrace import model

while Path({folder!r}, "wait").exists():
    threading.Event().wait(0.02)
if Path({folder!r}, "die").exists():
    os._exit(7)
if Path({folder!r}, "kill").exists():
    os.kill(os.getpid(), signal.SIGKILL)
if Path({folder!r}, "fail").exists():
    raise ValueError("not today")

@model(inputs={{"x": "FP32[-1,3]"}}, outputs={{"y": "FP32[-1,3]"}})
def moody(inputs):
    return {{"y": inputs["x"]}}
"""


@pytest.fixture
def moody(tmp_path: Path) -> Path:
    """Return the folder of the module; files in it steer the model."""
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "mood.py").write_text(MOODY.format(folder=str(folder)))
    return folder


def moody_flags(folder: Path) -> tuple[str, ...]:
    return ("--model-path", str(folder))


@pytest.fixture
def run_up(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Return a function that starts `up` with its output in pipes."""
    made: list[subprocess.Popen[str]] = []

    def run(*words: str, data: Path | None = None, **environ: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "headrace", "up", *words, "--data", str(data or tmp_path / "data")]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environ},
            start_new_session=True,
        )
        made.append(process)
        return process

    yield run
    for process in made:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=10)


def members(group: int) -> list[int]:
    """Return the pids of a process group."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


async def refused(process: subprocess.Popen[str]) -> str:
    """Return the one line with which it ended with 1 and nothing left behind."""
    out, err = await asyncio.to_thread(process.communicate, timeout=20)
    lines = [line for line in err.splitlines() if not line.startswith("{")]
    assert process.returncode == 1, (out, err)
    assert out == ""
    assert len(lines) == 1, lines
    assert lines[0].startswith("headrace: ")
    assert members(process.pid) == []
    return lines[0]


async def status(stack: Stack, path: str) -> tuple[int, dict[str, Any]]:
    """Return status and body; 0 while nobody listens."""
    with contextlib.suppress(aiohttp.ClientError, OSError):
        async with stack.http() as http, http.get(path) as answer:
            return answer.status, await answer.json()
    return 0, {}


async def reasons(stack: Stack) -> list[str]:
    found: list[str] = (await status(stack, "/v2/health/ready"))[1].get("details", {}).get("reasons", [])
    return found


async def answered(stack: Stack, model: str = "neg") -> dict[str, Any]:
    """Send a message and return what became of it."""
    async with stack.http() as http:
        id = await stack.submit(http, model, ROW)
        assert id is not None
        return await stack.result(http, id)


# -- starting and ending ----------------------------------------------------------------------------------------


async def test_it_says_where_it_is_ready_answers_and_stops_with_0(
    run_up: Callable[..., subprocess.Popen[str]],
) -> None:
    process = run_up(IRIS, "--port", "0", "--json")
    assert process.stdout is not None
    said = json.loads(await asyncio.to_thread(process.stdout.readline))
    assert said["models"] == ["iris"]
    assert said["broken"] == {}
    body = tensor("X", "FP32", [[5.8, 2.8, 5.1, 2.4]])
    async with aiohttp.ClientSession(said["url"]) as http:
        async with http.get("/v2/health/ready") as answer:
            assert answer.status == 200
        async with http.post("/v2/models/iris/infer", json=body, headers={"Prefer": "respond-async"}) as answer:
            assert answer.status == 202
            location = answer.headers["Location"]
        async with http.get(f"{location}?wait=10") as answer:
            assert answer.status == 200
            found = await answer.json()
    assert found["status"] == "succeeded"
    assert found["result"]["outputs"][0]["shape"] == [1]
    process.terminate()
    out, err = await asyncio.to_thread(process.communicate, timeout=30)
    assert (process.returncode, out) == (0, "")
    assert all(line.startswith("{") for line in err.splitlines())
    assert members(process.pid) == []


async def test_a24_it_is_live_and_not_ready_until_every_model_is_loaded_in_this_run(
    new_stack: NewStack, moody: Path
) -> None:
    stack = new_stack("moody=python:mood:moody", flags=moody_flags(moody), **QUICK)
    for _ in range(2):  # the second time there is a card of the first
        (moody / "wait").touch()
        stack.start()
        await until(lambda: reasons(stack), "not ready, with reasons")
        assert (await status(stack, "/v2/health/live"))[0] == 200
        assert any("'moody'" in reason and "not loaded yet" in reason for reason in await reasons(stack))
        assert (await status(stack, "/v2/models/moody/ready"))[0] == 503
        (moody / "wait").unlink()
        await stack.ready()
        assert (await status(stack, "/v2/models/moody/ready"))[0] == 200
        assert (await answered(stack, "moody"))["status"] == "succeeded"
        assert await stack.stop() == 0


async def test_a_ctrl_c_while_a_model_loads_ends_everything(new_stack: NewStack, moody: Path) -> None:
    (moody / "wait").touch()
    stack = new_stack("moody=python:mood:moody", flags=moody_flags(moody))
    stack.start()
    assert stack.process is not None
    await until(lambda: "model_loading" in stack.log(), "loading")
    os.killpg(stack.process.pid, signal.SIGINT)
    await until(lambda: stack.process is not None and stack.process.poll() is not None, "exit", 30)
    assert stack.process.returncode == 0
    assert members(stack.process.pid) == []


async def test_the_processes_are_named_for_what_they_are_and_stay_in_the_group(new_stack: NewStack) -> None:
    stack = new_stack(NEG, flags=("--workers", "2"))
    stack.start()
    await stack.ready()
    assert stack.process is not None
    counts = {service: len(stack.pids(service)) for service in ("ingest", "inference", "delivery", "prepare")}
    assert counts == {"ingest": 1, "inference": 2, "delivery": 1, "prepare": 0}
    for service in ("ingest", "inference", "delivery"):
        for pid in stack.pids(service):
            assert os.getsid(pid) == os.getpgid(pid) == stack.process.pid
    bound = [
        pid
        for pid in members(stack.process.pid)
        if any(each.status == psutil.CONN_LISTEN for each in psutil.Process(pid).net_connections("inet"))
    ]
    assert bound == stack.pids("ingest")


async def test_the_numbers_of_every_process_are_at_one_place(new_stack: NewStack) -> None:
    stack = new_stack(NEG, flags=("--workers", "2"))
    stack.start()
    await stack.ready()
    await answered(stack)

    async def scraped() -> bool:
        async with stack.http() as http, http.get("/metrics") as answer:
            text = await answer.text()
        names = ("ingest-0", "inference-0", "inference-1", "delivery-0")
        up = all(f'headrace_up{{instance="{name}",service="{name[:-2]}"}} 1.0' in text for name in names)
        return up and 'outcome="succeeded"' in text

    await until(scraped, "all four report")


# -- surviving --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("service", ["ingest", "inference", "delivery"])
async def test_a_service_that_is_killed_is_there_again(new_stack: NewStack, service: str) -> None:
    stack = new_stack(NEG, **QUICK)
    stack.start()
    await stack.ready()
    victim = stack.kill(service)
    await until(lambda: stack.pids(service) not in ([], [victim]), "another one")
    await stack.ready()
    assert (await answered(stack))["status"] == "succeeded"

    async def counted() -> bool:
        async with stack.http() as http, http.get("/metrics") as answer:
            return f'headrace_restarts_total{{instance="ingest-0",service="{service}"}} 1.0' in await answer.text()

    await until(counted, "the restart is counted")
    assert await stack.stop() == 0


async def test_an_ingest_that_was_given_a_free_port_comes_back_to_it(
    run_up: Callable[..., subprocess.Popen[str]],
) -> None:
    process = run_up(NEG, "--port", "0", "--json")
    assert process.stdout is not None
    url = json.loads(await asyncio.to_thread(process.stdout.readline))["url"]
    (victim,) = [child for child in psutil.Process(process.pid).children() if "ingest" in child.cmdline()]
    victim.kill()

    async def asked() -> bool:
        with contextlib.suppress(aiohttp.ClientError, OSError):
            async with aiohttp.ClientSession(url) as http, http.get("/v2/health/ready") as answer:
                return answer.status == 200
        return False

    await until(asked, "ready at the same place")


async def test_a_process_that_is_stopped_is_killed_and_replaced(new_stack: NewStack) -> None:
    stack = new_stack(NEG, HEADRACE_HEARTBEAT_TIMEOUT_S="3", **QUICK)
    stack.start()
    await stack.ready()
    victim = stack.kill("inference", signal.SIGSTOP)
    await until(lambda: stack.pids("inference") not in ([], [victim]), "another one")
    assert (await answered(stack))["status"] == "succeeded"
    assert "child_hung" in stack.log()
    assert await stack.stop() == 0


async def test_a15_it_is_not_ready_while_no_process_can_serve_and_what_is_accepted_waits(
    new_stack: NewStack, moody: Path
) -> None:
    stack = new_stack("moody=python:mood:moody", flags=moody_flags(moody), **QUICK)
    stack.start()
    await stack.ready()
    (moody / "die").touch()
    stack.kill("inference")
    said = await until(lambda: reasons(stack), "not ready")
    assert said == ["no inference process is ready; the last one died: exit code 7"]
    async with stack.http() as http:
        id = await stack.submit(http, "moody", ROW)
        assert id is not None
        (moody / "die").unlink()
        assert (await stack.result(http, id))["status"] == "succeeded"
    await stack.ready()
    assert await stack.stop() == 0


async def test_a_version_that_fails_to_load_in_a_new_process_is_tried_again(new_stack: NewStack, moody: Path) -> None:
    stack = new_stack(NEG, "moody=python:mood:moody", flags=moody_flags(moody), **QUICK)
    stack.start()
    await stack.ready()
    (moody / "fail").touch()
    stack.kill("inference")
    await until(lambda: any("not today" in reason for reason in stack.log().splitlines()), "it failed")
    assert (await answered(stack, "neg"))["status"] == "succeeded"
    (moody / "fail").unlink()
    await stack.ready()
    assert (await answered(stack, "moody"))["status"] == "succeeded"
    assert await stack.stop() == 0


async def test_an_up_that_was_killed_leaves_room_for_the_next_at_once(new_stack: NewStack) -> None:
    stack = new_stack(NEG, **QUICK)
    stack.start()
    await stack.ready()
    assert stack.process is not None
    first = members(stack.process.pid)
    stack.process.kill()
    stack.process.wait(10)
    stack.start()
    await stack.ready()
    await until(lambda: not any(psutil.pid_exists(pid) for pid in first), "the orphans are gone")
    assert (await answered(stack))["status"] == "succeeded"
    assert await stack.stop() == 0


# -- broken models ----------------------------------------------------------------------------------------------


async def _tried(listed: Callable[[], Awaitable[dict[str, Any]]]) -> bool:
    return "not today" in (await listed())["moody"].get("reason", "")


async def test_a20_broken_models_are_shown_with_their_reasons_and_the_rest_is_served(
    new_stack: NewStack, moody: Path
) -> None:
    (moody / "empty.onnx").touch()
    (moody / "fail").touch()
    stack = new_stack(
        NEG,
        "empty.onnx",
        "moody=python:mood:moody",
        "nowhere=nowhere.onnx",
        flags=moody_flags(moody),
        HEADRACE_MODEL_REQUIRE_ALL="false",
    )
    stack.start()
    await stack.ready()

    async def listed() -> dict[str, Any]:
        async with stack.http() as http, http.post("/v2/repository/index", json={}) as answer:
            return {each["name"]: each for each in await answer.json()}

    # Ready means that one of them serves; the last may not have been tried yet.
    await until(lambda: _tried(listed), "all were tried")
    index = await listed()
    assert index["neg"]["state"] == "READY"
    assert index["empty"]["state"] == "UNAVAILABLE" and index["empty"]["reason"]
    assert "not today" in index["moody"]["reason"]
    assert (await answered(stack, "neg"))["status"] == "succeeded"
    async with stack.http() as http, http.post("/v2/models/empty/infer", json=ROW) as answer:
        assert answer.status == 503
        assert (await answer.json())["code"] == "model_unavailable"
    await until(lambda: "headrace: not served: " in stack.log(), "announced")
    assert await stack.stop() == 0


async def test_with_all_models_required_the_rest_is_served_and_ready_says_what_is_missing(
    new_stack: NewStack, moody: Path
) -> None:
    (moody / "fail").touch()
    stack = new_stack(NEG, "moody=python:mood:moody", flags=moody_flags(moody))
    stack.start()
    await until(lambda: "headrace: not served: " in stack.log(), "announced")
    said = await reasons(stack)
    assert len(said) == 1 and "not today" in said[0]
    assert (await answered(stack, "neg"))["status"] == "succeeded"
    assert await stack.stop() == 0


async def test_a_model_that_kills_its_process_on_load_breaks_nothing_else(new_stack: NewStack, moody: Path) -> None:
    (moody / "kill").touch()
    stack = new_stack("moody=python:mood:moody", NEG, flags=moody_flags(moody), HEADRACE_MODEL_REQUIRE_ALL="false")
    stack.start()
    await stack.ready()
    assert (await answered(stack, "neg"))["status"] == "succeeded"
    _, state = await status(stack, "/v2/models/moody/ready")
    assert "the process that loaded it died (SIGKILL)" in json.dumps(state)
    assert await stack.stop() == 0


async def test_strict_refuses_to_start_with_one_broken_model(
    run_up: Callable[..., subprocess.Popen[str]], moody: Path
) -> None:
    (moody / "fail").touch()
    words = (NEG, "moody=python:mood:moody", "--strict", "--port", "0", *moody_flags(moody))
    assert "not today" in await refused(run_up(*words))


async def test_with_nothing_but_broken_models_it_ends_with_the_reasons(
    run_up: Callable[..., subprocess.Popen[str]], moody: Path
) -> None:
    (moody / "empty.onnx").touch()
    line = await refused(run_up("empty.onnx", "nowhere=nowhere.onnx", "--port", "0", *moody_flags(moody)))
    assert "empty.onnx" in line and "nowhere.onnx" in line


# -- refusing ---------------------------------------------------------------------------------------------------


async def test_a16_a_port_that_is_taken_is_named(run_up: Callable[..., subprocess.Popen[str]]) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        line = await refused(run_up(NEG, "--port", str(port), "--workers", "4"))
    assert line == f"headrace: ingest: cannot listen on 127.0.0.1:{port}: address already in use"


async def test_a_second_up_on_one_folder_is_refused_and_the_first_goes_on(
    new_stack: NewStack, run_up: Callable[..., subprocess.Popen[str]]
) -> None:
    stack = new_stack(NEG)
    stack.start()
    await stack.ready()
    assert stack.process is not None
    line = await refused(run_up(NEG, "--port", str(free_port()), data=stack.folder / "data"))
    assert f"pid {stack.process.pid}" in line
    assert (await answered(stack))["status"] == "succeeded"


async def test_what_cannot_be_a_database_is_said_once(
    run_up: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "headrace.db").write_bytes(b"no database at all " * 100)
    line = await refused(run_up(NEG, "--port", "0"))
    assert "headrace.db is damaged or no database" in line


async def test_memory_cannot_be_shared_and_is_refused(run_up: Callable[..., subprocess.Popen[str]]) -> None:
    assert "memory://" in await refused(run_up(NEG, "--port", "0", "--store", "memory://"))


async def test_a_folder_that_cannot_be_made_is_named(
    run_up: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    assert "file/data" in await refused(run_up(NEG, "--port", "0", data=tmp_path / "file" / "data"))
