"""`headrace serve` with more models than fit, and with runners that are killed: real processes, a real client."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp
import psutil
import pytest

from journeys.stack import free_port, tensor, until
from runtimes import onnx_files

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

MIB = 1 << 20


class Server:
    """One `headrace serve` in a process group of its own."""

    def __init__(self, folder: Path, *words: str, **environ: str) -> None:
        self.port = free_port()
        self.log = folder / f"serve-{self.port}.log"
        own = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "headrace", "serve", *words, "--port", str(self.port)],
                stdout=log,
                stderr=log,
                env={**own, **environ},
                start_new_session=True,
            )

    def http(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(f"http://127.0.0.1:{self.port}", timeout=aiohttp.ClientTimeout(total=60))

    def runners(self) -> list[int]:
        found = []
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if "runner" in child.cmdline():
                    found.append(child.pid)
        return found

    async def is_ready(self, http: aiohttp.ClientSession) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        with contextlib.suppress(aiohttp.ClientError, OSError):
            async with http.get("/v2/health/ready") as answer:
                return answer.status == 200
        return False

    async def metric(self, http: aiohttp.ClientSession, name: str, model: str = "") -> float:
        async with http.get("/metrics") as answer:
            text = await answer.text()
        found = 0.0
        for line in text.splitlines():
            if re.match(rf"{name}[{{ ]", line) and (not model or f'model="{model}"' in line):
                found += float(line.rpartition(" ")[2])
        return found

    async def stop(self) -> int:
        """SIGTERM to all of them at once, as a terminal and a container do."""
        os.killpg(self.process.pid, signal.SIGTERM)
        await until(lambda: self.process.poll() is not None, "its end", 40)
        return self.process.returncode


NewServer = Callable[..., Server]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[NewServer]:
    made: list[Server] = []

    def new(*words: str, **environ: str) -> Server:
        made.append(Server(tmp_path, *words, **environ))
        return made[-1]

    yield new
    for server in made:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait(10)


async def test_three_models_under_a_budget_for_two(serve: NewServer, tmp_path: Path) -> None:
    large, small = 3500, 2000
    widths = {"large": large, "one": small, "other": small}
    words = []
    for name, width in widths.items():
        words.append(f"{name}={onnx_files.save(onnx_files.linear(width, width), tmp_path / f'{name}.onnx')}")

    async def ask(http: aiohttp.ClientSession, name: str) -> None:
        body = tensor("x", "FP32", [[1.0] * widths[name]])
        async with http.post(f"/v2/models/{name}/infer", json=body) as answer:
            assert answer.status == 200, await answer.text()

    # What each of them takes on this machine, when there is room for all.
    roomy = serve(*words)
    async with roomy.http() as http:
        await until(lambda: roomy.is_ready(http), "ready")
        takes = {name: await roomy.metric(http, "headrace_model_memory_bytes", name) for name in widths}
        assert await roomy.metric(http, "headrace_model_evictions_total") == 0
    assert await roomy.stop() == 0
    assert takes["large"] > large * large * 4

    budget = int(takes["large"] + takes["one"] + takes["other"] / 4)
    tight = serve(*words, HEADRACE_MODEL_MEMORY_BYTES_MAX=str(budget))
    async with tight.http() as http:
        await until(lambda: tight.is_ready(http), "ready")
        # The third one to be loaded took the place of the first, which is listed and ready all the same.
        assert await tight.metric(http, "headrace_model_evictions_total", "large") == 1
        async with http.get("/v2/models/large/ready") as answer:
            assert answer.status == 200
        for name in ("large", "other", "large", "other"):
            await ask(http, name)
        high = psutil.Process(tight.process.pid).memory_info().rss
        # Now the large one is idle; it goes, and with it goes its memory.
        await ask(http, "other")
        await ask(http, "one")
        assert await tight.metric(http, "headrace_model_evictions_total", "large") == 2
        assert await tight.metric(http, "headrace_model_memory_bytes", "large") == 0
        low = psutil.Process(tight.process.pid).memory_info().rss
        assert high - low > large * large * 4, "of twice that, the small one that came took a third"
        # It comes back for many who ask at once, and is loaded once for all of them.
        await asyncio.gather(*(ask(http, "large") for _ in range(20)))
        assert await tight.is_ready(http)
    assert await tight.stop() == 0
    loaded = re.findall(r'"event":"model_loaded".*?"model":"(\w+)"', tight.log.read_text())
    assert loaded == ["large", "one", "other", "large", "one", "large"]


@pytest.mark.parametrize("workers", [1, 2])
async def test_a15_kill_9_of_a_runner_under_50_requests_a_second(serve: NewServer, workers: int) -> None:
    server = serve(
        "slow=python:headrace.testing.models:slow", "--workers", str(workers), HEADRACE_MODEL_RUNNER="process"
    )
    ended: list[tuple[float, float, int, str]] = []

    async def ask(http: aiohttp.ClientSession) -> None:
        began_s = time.monotonic()
        async with http.post("/v2/models/slow/infer", json=tensor("x", "FP32", [[0.1]])) as answer:
            content = await answer.json()
            ended.append((began_s, time.monotonic(), answer.status, content.get("code", "")))

    async with server.http() as http:
        await until(lambda: server.is_ready(http), "ready")
        before = server.runners()
        assert len(before) == workers
        calls, killed_s = [], 0.0
        for number in range(200):
            calls.append(asyncio.create_task(ask(http)))
            await asyncio.sleep(0.02)
            if number == 100:
                os.kill(before[0], signal.SIGKILL)
                killed_s = time.monotonic()
        await asyncio.gather(*calls)
        await until(lambda: server.is_ready(http), "ready again by itself")
        failed = [each for each in ended if each[2] != 200]
        assert failed, "something ran there when it was killed"
        assert {(status, code) for _, _, status, code in failed} == {(503, "model_unavailable")}
        assert all(end_s - killed_s < 2 for _, end_s, _, _ in failed)
        # Whoever came once it was known to be dead was answered, by the other runner or by the next.
        first_s = min(end_s for _, end_s, _, _ in failed)
        assert all(status == 200 for began_s, _, status, _ in ended if began_s > first_s)
        assert len(failed) <= 64, "one batch"
        await until(lambda: len(server.runners()) == workers, "as many runners as before")
        assert before[0] not in server.runners()
        assert await server.metric(http, "headrace_runner_restarts_total", "slow") == 1
        runners = server.runners()
    assert await server.stop() == 0
    assert not any(psutil.pid_exists(pid) for pid in runners), "no runner is left behind"


async def test_a15_a_request_that_kills_its_runner_fails_alone_and_the_server_stays(serve: NewServer) -> None:
    models = [f"{name}=python:headrace.testing.models:{name}" for name in ("kill", "echo")]
    server = serve(*models, HEADRACE_MODEL_PROCESSES="kill")
    async with server.http() as http:
        await until(lambda: server.is_ready(http), "ready")
        assert len(server.runners()) == 1, "only the one that the setting names"
        for _ in range(3):
            async with http.post("/v2/models/kill/infer", json=tensor("x", "FP32", [[666.0]])) as answer:
                content = await answer.json()
                assert (answer.status, content["code"]) == (503, "model_unavailable")
            for name, row in (("echo", [1.0, 2.0, 3.0]), ("kill", [1.0])):
                async with http.post(f"/v2/models/{name}/infer", json=tensor("x", "FP32", [row])) as answer:
                    assert answer.status == 200, await answer.text()
        await until(lambda: server.is_ready(http), "ready again by itself")
    assert await server.stop() == 0


async def test_runners_do_not_outlive_a_server_that_is_killed(serve: NewServer) -> None:
    server = serve("slow=python:headrace.testing.models:slow", "--workers", "2", HEADRACE_MODEL_RUNNER="process")
    async with server.http() as http:
        await until(lambda: server.is_ready(http), "ready")
        hanging = asyncio.create_task(http.post("/v2/models/slow/infer", json=tensor("x", "FP32", [[100.0]])))
        await until(lambda: server.metric(http, "headrace_http_in_flight"), "a request in progress")
        runners = server.runners()
        assert len(runners) == 2
        server.process.kill()
        with contextlib.suppress(aiohttp.ClientError):
            await hanging

    def have_ended() -> bool:
        for pid in runners:
            with contextlib.suppress(psutil.NoSuchProcess):
                if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                    return False
        return True

    await until(have_ended, "the end of its runners", 20)
