"""Models in processes of their own: what dies, what does not, and that it comes back by itself."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from headrace.errors import Internal, ModelFailed, ModelUnavailable
from headrace.models.batch import BatchSettings
from headrace.models.host import ModelSettings
from headrace.models.predictor import Predictor
from headrace.models.process_runner import RunnerDied
from headrace.runtimes import Artifact
from headrace.tensor import InferAnswer
from models.kit import Told, predictor, python_model, request

pytestmark = pytest.mark.timeout(120)


async def door_to(*artifacts: Artifact, told: Told | None = None, **settings: Any) -> Predictor:
    batch = BatchSettings(size_max=settings.pop("size_max", 8))
    chosen = ModelSettings(**{"runner": "process", **settings})
    return await predictor(*artifacts, told=told, settings=chosen, batch=batch, apart=True)


def got(answer: InferAnswer) -> Any:
    return answer.outputs["y"].array.tolist()


def pid_of(door: Predictor, name: str, number: int = 0) -> int:
    found = door.pick(name).crew[number].pid
    assert found is not None
    return found


async def until(happened: Callable[[], Any], what: str, timeout_s: float = 60.0) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            while not happened():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"{timeout_s} s passed without: {what}") from None


async def running(door: Predictor) -> None:
    await until(lambda: door.progress().running_since_s is not None, "a run")


def module(folder: Path, name: str, text: str) -> Artifact:
    (folder / f"{name}.py").write_text(
        "import os, signal, sys, threading, time\nimport numpy as np\nimport headrace\n" + text
    )
    return Artifact(name, "1", "python", None, f"{name}:call", root=folder)


DECLARED = "@headrace.model(inputs={'x': 'FP32[-1,3]'}, outputs={'y': 'FP32[-1,3]'})\ndef call(inputs):\n"


# -- answering -----------------------------------------------------------------------------------------------------


async def test_it_answers_from_another_process_and_this_one_never_loads_the_model(tmp_path: Path) -> None:
    artifact = module(tmp_path, "headrace_made_up_elsewhere", DECLARED + "    return inputs['x'] * 0 + os.getpid()\n")
    door = await door_to(artifact)
    answer = await door.submit(request([[1, 2, 3]], model=artifact.name))
    assert got(answer)[0][0] == np.float32(pid_of(door, artifact.name))
    assert artifact.name not in sys.modules
    assert door.pick(artifact.name).batcher.runner == "process"  # type: ignore[union-attr]
    assert door.models()[0].signature is not None and door.models()[0].platform == "python"
    await door.close()


async def test_text_and_batches_and_failures_cross_the_border() -> None:
    told = Told()
    door = await door_to(python_model("text"), python_model("neg"), told=told)
    answer = await door.submit(request([b"a\0", b"\xff"], model="text", dtype=object))
    assert got(answer) == [b"a\0", b"\xff"]
    waiting = [door.submit(request([[-1 if n == 3 else n, 0, 0]], model="neg")) for n in range(8)]
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(results[3], ModelFailed) and "ValueError: a value is negative" in results[3].message
    assert [got(r) for n, r in enumerate(results) if n != 3] == [[[n, 0, 0]] for n in range(8) if n != 3]
    assert "models.py" in told.log(), "the traceback of the other process belongs in the log"
    await door.close()


async def test_two_processes_run_two_batches_at_a_time_of_what_does_one_alone(tmp_path: Path) -> None:
    text = (
        "import pathlib\nfolder = pathlib.Path(__file__).parent\n"
        + DECLARED
        + "    if inputs['x'][0, 0] > 0:\n"
        + "        (folder / f'inside-{os.getpid()}').touch()\n"
        + "        while len(list(folder.glob('inside-*'))) < 2: time.sleep(0.01)\n"
        + "    return inputs['x']\n"
    )
    artifact = module(tmp_path, "headrace_made_up_pair", text)
    door = await door_to(artifact, runner="auto", runners=2, size_max=1)
    hosted = door.pick(artifact.name)
    assert hosted.batcher is not None and hosted.batcher.runner == "process" and len(hosted.crew) == 2
    # Neither ends before the other has begun.
    await asyncio.gather(*(door.submit(request([[1, 2, 3]], model=artifact.name)) for _ in range(2)))
    await door.close()
    sys.path.remove(str(tmp_path))


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, "thread"),
        ({"runners": 4}, "thread"),
        ({"processes": ("echo",)}, "process"),
        ({"processes": ("echo/1",)}, "process"),
        ({"processes": ("echo/2", "other")}, "thread"),
        ({"runner": "process"}, "process"),
        ({"runner": "thread", "processes": ("echo",)}, "process"),
    ],
)
async def test_which_runner_it_is_follows_the_settings(settings: dict[str, Any], kind: str) -> None:
    door = await predictor(python_model("echo"), settings=ModelSettings(**settings), apart=True)
    assert door.pick("echo").batcher.runner == kind  # type: ignore[union-attr]
    await door.close()


async def test_where_processes_are_not_wanted_there_are_none() -> None:
    door = await predictor(python_model("echo"), settings=ModelSettings(runner="process", processes=("echo",)))
    assert door.pick("echo").batcher.runner == "thread"  # type: ignore[union-attr]
    await door.close()


@pytest.mark.parametrize(
    "raising",
    ["ValueError(b'\\xff'.decode(errors='surrogateescape'))", "SystemExit(3)", "KeyboardInterrupt()", "_Dumb()"],
)
async def test_whatever_it_raises_its_process_stays(tmp_path: Path, raising: str) -> None:
    text = (
        "class _Dumb(Exception):\n    def __str__(self):\n        raise RuntimeError('no words')\n"
        + DECLARED
        + f"    if inputs['x'][0, 0] == 666:\n        raise {raising}\n"
        + "    return inputs['x']\n"
    )
    artifact = module(tmp_path, "headrace_made_up_rude", text)
    told = Told()
    door = await door_to(artifact, told=told)
    pid = pid_of(door, artifact.name)
    with pytest.raises((ModelFailed, Internal)):
        await door.submit(request([[666, 0, 0]], model=artifact.name))
    assert got(await door.submit(request([[1, 2, 3]], model=artifact.name))) == [[1, 2, 3]]
    assert pid_of(door, artifact.name) == pid and "runner_died" not in told.log()
    await door.close()


# -- loading -------------------------------------------------------------------------------------------------------


async def test_what_cannot_be_loaded_says_the_same_as_it_would_here(tmp_path: Path) -> None:
    (tmp_path / "empty.onnx").write_bytes(b"")
    artifact = Artifact("empty", "1", "onnx", tmp_path / "empty.onnx")
    apart = await door_to(artifact, python_model("echo"))
    here = await predictor(artifact)
    assert apart.models()[1].reason == here.models()[0].reason
    assert apart.models()[0].ready
    await apart.close()


async def test_one_that_dies_when_it_is_loaded_takes_nobody_with_it(tmp_path: Path) -> None:
    artifact = module(tmp_path, "headrace_made_up_fatal", "os.kill(os.getpid(), signal.SIGSEGV)\n")
    door = await door_to(artifact, python_model("echo"))
    assert "the process that loaded it died (SIGSEGV)" in door.models()[1].reason
    assert got(await door.submit(request([[1, 2, 3]], model="echo"))) == [[1, 2, 3]]
    await door.close()


async def test_what_it_holds_is_measured_in_its_processes(tmp_path: Path) -> None:
    text = "kept = np.ones(60 << 20, np.uint8)\n" + DECLARED + "    return inputs['x']\n"
    door = await door_to(module(tmp_path, "headrace_made_up_heavy", text), python_model("echo"))
    heavy, light = (door.pick(name).memory_bytes for name in ("headrace_made_up_heavy", "echo"))
    assert heavy - light > 50 << 20
    await door.close()


# -- dying ---------------------------------------------------------------------------------------------------------


async def test_a15_what_it_ran_fails_at_once_and_what_waited_runs_in_the_next_process() -> None:
    told = Told()
    door = await door_to(python_model("kill"), python_model("echo"), told=told, size_max=2)
    first = pid_of(door, "kill")
    company = [door.submit(request([[value, 0]], model="kill")) for value in (666, 1)]
    waiting = [door.submit(request([[value, 0]], model="kill")) for value in range(2, 8)]
    async with asyncio.timeout(2):
        for one in company:
            with pytest.raises(RunnerDied) as caught:
                await one
    assert caught.value.code == "model_unavailable" and caught.value.retryable
    # The other model's runner is another process.
    assert got(await door.submit(request([[1, 2, 3]], model="echo"))) == [[1, 2, 3]]
    assert [got(answer)[0][0] for answer in await asyncio.gather(*waiting)] == list(range(2, 8))
    assert pid_of(door, "kill") != first
    await until(lambda: not door.ready(), "ready again by itself")
    assert told.counted("headrace_runner_restarts_total", "kill") == 1
    for event in ("runner_died", "runner_back"):
        assert told.log().count(f'"event":"{event}"') == 1
    await door.close()


async def test_a15_one_that_is_killed_while_it_idles_is_not_ready_until_it_is_back() -> None:
    told = Told()
    door = await door_to(python_model("echo"), told=told)
    gauge = told.metrics.gauge("headrace_model_ready")("echo", "1")
    os.kill(pid_of(door, "echo"), signal.SIGKILL)
    await until(lambda: door.ready(), "not ready")
    assert "its runner died (SIGKILL) and is being started again" in door.ready()[0]
    assert not door.models()[0].ready and gauge.value == 0
    # Who comes now waits for it.
    assert got(await door.submit(request([[1, 2, 3]], model="echo"))) == [[1, 2, 3]]
    assert not door.ready() and gauge.value == 1
    await door.close()


async def test_a15_while_another_process_is_left_nobody_else_notices() -> None:
    door = await door_to(python_model("slow"), runners=2, size_max=1)
    running_there = [door.submit(request([[0.5]], model="slow")) for _ in range(2)]
    await until(lambda: door.pick("slow").batcher.running == 2, "two runs")  # type: ignore[union-attr]
    os.kill(pid_of(door, "slow", 1), signal.SIGKILL)
    results = await asyncio.gather(*running_there, return_exceptions=True)
    assert sum(isinstance(result, RunnerDied) for result in results) == 1
    assert not door.ready()
    answers = await asyncio.gather(*(door.submit(request([[0.0]], model="slow")) for _ in range(20)))
    assert len(answers) == 20
    await door.close()


async def test_who_waits_for_a_process_has_only_so_much_patience(tmp_path: Path) -> None:
    text = (
        "import pathlib\nflag = pathlib.Path(__file__).parent / 'hold'\n"
        + "while flag.exists(): time.sleep(0.01)\n"
        + DECLARED
        + "    return inputs['x']\n"
    )
    artifact = module(tmp_path, "headrace_made_up_slow_start", text)
    door = await door_to(artifact, restart_wait_s=0.3)
    (tmp_path / "hold").touch()
    os.kill(pid_of(door, artifact.name), signal.SIGKILL)
    await until(lambda: door.ready(), "not ready")
    asked = request([[1, 2, 3]], model=artifact.name)
    with pytest.raises(ModelUnavailable, match="is being started again"):
        await door.submit(asked)
    with pytest.raises(ModelUnavailable, match="is being started again"):
        door.submit(asked)  # at once, from now on
    (tmp_path / "hold").unlink()
    await until(lambda: not door.ready(), "ready again")
    assert got(await door.submit(asked)) == [[1, 2, 3]]
    await door.close()


async def test_a15_one_that_dies_on_every_start_is_given_up_and_the_others_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.supervise.restarts.DEATHS_MAX", 3)
    text = (
        "import pathlib\nif (pathlib.Path(__file__).parent / 'die').exists(): os._exit(9)\n"
        + DECLARED
        + "    return inputs['x']\n"
    )
    artifact = module(tmp_path, "headrace_made_up_mortal", text)
    told = Told()
    door = await door_to(artifact, python_model("echo"), told=told)
    (tmp_path / "die").touch()
    os.kill(pid_of(door, artifact.name), signal.SIGKILL)
    await until(lambda: "runner_given_up" in told.log(), "given up")
    await until(lambda: any("was given up" in reason for reason in door.ready()), "a reason")
    assert "exit code 9" in door.ready()[0]
    with pytest.raises(ModelUnavailable, match="given up"):
        door.submit(request([[1, 2, 3]], model=artifact.name))
    assert got(await door.submit(request([[1, 2, 3]], model="echo"))) == [[1, 2, 3]]
    # Loading it again is the way back.
    (tmp_path / "die").unlink()
    await door.host.load([artifact])
    assert not door.ready()
    assert got(await door.submit(request([[1, 2, 3]], model=artifact.name))) == [[1, 2, 3]]
    await door.close()


async def test_one_that_hangs_is_killed_at_its_limit_and_comes_back() -> None:
    told = Told()
    door = await door_to(python_model("slow"), told=told, run_s_max=0.3)
    hanging = door.submit(request([[100.0]], model="slow"))
    with pytest.raises(RunnerDied, match=r"for more than 0\.3 seconds"):
        await hanging
    assert got(await door.submit(request([[0.0]], model="slow"))) == [[0.0]]
    await until(lambda: "it ran for more than" in told.log(), "the reason in the log")
    await door.close()


async def test_what_a_model_started_does_not_keep_its_death_secret(tmp_path: Path) -> None:
    # A fork without an exec holds everything open that its parent held, the socket to us too.
    text = (
        DECLARED
        + "    if inputs['x'][0, 0] == 666:\n"
        + "        if os.fork() == 0:\n"
        + "            time.sleep(20)\n"
        + "            os._exit(0)\n"
        + "        os.kill(os.getpid(), signal.SIGKILL)\n"
        + "    return inputs['x']\n"
    )
    artifact = module(tmp_path, "headrace_made_up_forks", text)
    door = await door_to(artifact)
    async with asyncio.timeout(2):
        with pytest.raises(RunnerDied):
            await door.submit(request([[666, 0, 0]], model=artifact.name))
    assert got(await door.submit(request([[1, 2, 3]], model=artifact.name))) == [[1, 2, 3]]
    await door.close()


# -- ending --------------------------------------------------------------------------------------------------------


async def test_a_stop_signal_to_the_whole_family_lets_it_finish_and_closing_ends_it(tmp_path: Path) -> None:
    text = (
        "import pathlib\nfolder = pathlib.Path(__file__).parent\n"
        + "@headrace.model(inputs={'x': 'FP32[-1,3]'}, outputs={'y': 'FP32[-1,3]'})\n"
        + "class call:\n"
        + "    def __call__(self, inputs):\n"
        + "        time.sleep(float(inputs['x'][0, 0]))\n"
        + "        return inputs['x']\n"
        + "    def close(self):\n"
        + "        (folder / 'closed').touch()\n"
    )
    artifact = module(tmp_path, "headrace_made_up_tidy", text)
    door = await door_to(artifact)
    pid = pid_of(door, artifact.name)
    waiting = door.submit(request([[0.3, 0, 0]], model=artifact.name))
    await running(door)
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(pid, number)
    assert got(await waiting)[0][1:] == [0, 0]
    await door.close()
    assert (tmp_path / "closed").exists(), "the model's own close() was called"
    assert not psutil.pid_exists(pid)


async def test_one_that_hangs_does_not_keep_us_from_closing() -> None:
    door = await door_to(python_model("slow"))
    pid = pid_of(door, "slow")
    hanging = door.submit(request([[100.0]], model="slow"))
    await running(door)
    async with asyncio.timeout(30):
        await door.close(timeout_s=0.1)
    with pytest.raises(ModelUnavailable):
        await hanging
    assert not psutil.pid_exists(pid)


PARENT = """
import asyncio, sys
sys.path.insert(0, {tests!r})
from models.kit import python_model, request
from models.test_process_runner import door_to
async def main():
    door = await door_to(python_model("slow"))
    waiting = door.submit(request([[{seconds}]], model="slow"))
    while door.progress().running_since_s is None and {seconds} > 0:
        await asyncio.sleep(0.01)
    print(door.pick("slow").crew[0].pid, flush=True)
    await asyncio.sleep(100)
asyncio.run(main())
"""


@pytest.mark.parametrize("seconds", [0.0, 100.0])
async def test_it_dies_with_its_parent_also_in_the_middle_of_a_run(seconds: float) -> None:
    text = PARENT.format(tests=str(Path(__file__).parents[1]), seconds=seconds)
    parent = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        pid = int(await asyncio.to_thread(parent.stdout.readline))
        assert psutil.pid_exists(pid)
        parent.kill()

        def has_ended() -> bool:
            with contextlib.suppress(psutil.NoSuchProcess):
                return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE  # whoever inherits it may be slow to look
            return True

        await until(has_ended, "its end", 20)
    finally:
        parent.kill()
        parent.wait(10)
        parent.stdout.close()  # type: ignore[union-attr]


async def test_reloading_under_load_fails_no_request() -> None:
    door = await door_to(python_model("echo"))
    stop, answered = asyncio.Event(), 0

    async def call() -> None:
        nonlocal answered
        while not stop.is_set():
            assert got(await door.submit(request([[1, 2, 3]], model="echo"))) == [[1, 2, 3]]
            answered += 1

    callers = [asyncio.create_task(call()) for _ in range(8)]
    pids = {pid_of(door, "echo")}
    for _ in range(3):
        await door.host.load([python_model("echo")])
        pids.add(pid_of(door, "echo"))
    stop.set()
    await asyncio.gather(*callers)
    assert len(pids) == 4 and answered > 100
    await door.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
