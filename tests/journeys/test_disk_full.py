"""A stack whose disk becomes full under load: it refuses, loses no 202, and goes on by itself when there is room."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from headrace.testing.history import check
from journeys.stack import Stack, tensor, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

NewStack = Callable[..., Stack]
NEG = "neg=python:headrace.testing.models:neg"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a folder whose `data` is a disk of 8 MiB, 2 of which are ballast."""
    data = tmp_path / "data"
    data.mkdir()
    if shutil.which("mount") is None:
        pytest.skip("there is no mount here")
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "headrace-test", str(data)], capture_output=True)
    if made.returncode != 0:
        pytest.skip(f"a small disk cannot be made here: {made.stderr.decode().strip()}")
    (data / "ballast").write_bytes(bytes(2 * 1024 * 1024))
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(data)], check=True)


def rows(number: int) -> dict[str, Any]:
    return tensor("x", "FP32", [[float(number), 1.0, float(row)] for row in range(400)])


async def fill(stack: Stack, http: aiohttp.ClientSession, limit: int) -> list[tuple[int, str]]:
    """Submit from several clients until each was refused ten times in a row; return the refusals."""
    refusals: list[tuple[int, str]] = []
    numbers = iter(range(limit))

    async def client() -> None:
        in_a_row = 0
        for number in numbers:
            headers = {"Prefer": "respond-async"}
            async with http.post("/v2/models/neg/infer", json=rows(number), headers=headers) as answer:
                content = await answer.json()
                if answer.status == 202:
                    stack.history.accept(content["id"])
                    in_a_row = 0
                    continue
                assert "Location" not in answer.headers
                refusals.append((answer.status, content["code"]))
                in_a_row += 1
            if in_a_row == 10:
                return
            await asyncio.sleep(0.02)
        raise AssertionError("the disk never became full")

    await asyncio.gather(*(client() for _ in range(4)))
    return refusals


async def test_a_disk_that_fills_up_under_load_refuses_loses_nothing_and_recovers_without_a_restart(
    small_disk: Path, new_stack: NewStack
) -> None:
    stack = new_stack(NEG, folder=small_disk, HEADRACE_INFERENCE_CLAIM_S="2")
    stack.start()
    await stack.ready()
    pids = {service: stack.pids(service) for service in ("ingest", "inference", "delivery")}
    async with stack.http() as http:
        refusals = await fill(stack, http, 20_000)
        assert stack.history.accepted
        assert {code for _, code in refusals} <= {"storage_full", "store_unavailable", "broker_unavailable"}
        assert (507, "storage_full") in refusals
        async with http.get("/v2/health/live") as answer:
            assert answer.status == 200
        (small_disk / "data" / "ballast").unlink()

        async def accepted_again() -> bool:
            return await stack.submit(http, "neg", tensor("x", "FP32", [[1.0, 2.0, 3.0]])) is not None

        await until(accepted_again, "a message is accepted again")
        ending = await stack.drained(http)
        assert check(stack.history, ending) == []
        await until(lambda: _is_ready(http), "ready again")
    assert {service: stack.pids(service) for service in pids} == pids, "nothing was restarted"
    assert await stack.stop() == 0


async def _is_ready(http: aiohttp.ClientSession) -> bool:
    async with http.get("/v2/health/ready") as answer:
        return answer.status == 200
