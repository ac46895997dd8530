"""Whatever a model raises or returns ends as one result that can be read, and keeps nobody else from theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from headrace.testing.history import check
from journeys.moods import RAISED, RETURNED
from journeys.stack import Stack, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

MODELS = ["moods=python:journeys.moods:moods", "neg=python:headrace.testing.models:neg"]
CODES = ["", *(code for _, code in RAISED), *("model_failed" for _ in RETURNED)]


def asking(mood: int) -> dict[str, Any]:
    return {"inputs": [{"name": "x", "shape": [1], "datatype": "INT64", "data": [mood]}]}


async def test_no_mood_of_a_model_blocks_the_line_or_spoils_what_is_read(new_stack: Callable[..., Stack]) -> None:
    stack = new_stack(*MODELS, PYTHONPATH=str(Path(__file__).parents[1]))
    stack.start()
    await stack.ready()
    async with stack.http() as http:
        ids = [await stack.submit(http, "moods", asking(mood)) for mood in range(len(CODES))]
        neighbour = {"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}]}
        ids += [await stack.submit(http, "neg", neighbour) for _ in range(5)]
        assert all(ids)
        stack.history.meant_to_fail.update(id for id, code in zip(ids, CODES, strict=False) if code)
        ending = await stack.drained(http)
        assert check(stack.history, ending) == []
        for id, code in zip(ids, [*CODES, *[""] * 5], strict=True):
            async with http.get(f"/requests/{id}") as answer:
                shown = await answer.json()
            assert (answer.status, (shown["error"] or {"code": ""})["code"]) == (200, code), shown
        await same_on_the_short_road(http)
    assert '"event":"loop_failed"' not in stack.log()
    assert await stack.stop() == 0


async def same_on_the_short_road(http: aiohttp.ClientSession) -> None:
    """A caller that waits gets what a caller that comes back gets."""
    for mood, code in enumerate(CODES):
        async with http.post("/v2/models/moods/infer", json=asking(mood)) as answer:
            body = await answer.json()
        assert body.get("code", "") == code
        assert answer.status == {"": 200, "invalid_value": 400, "model_failed": 500}[code]


async def test_serve_answers_every_mood(tmp_path: Path, new_stack: Callable[..., Stack]) -> None:
    stack = new_stack(*MODELS, command="serve", PYTHONPATH=str(Path(__file__).parents[1]))
    stack.start()
    await stack.ready()
    async with stack.http() as http:
        await asyncio.wait_for(same_on_the_short_road(http), 60)
    await until(lambda: stack.process is not None and stack.process.poll() is None, "it lives")
    assert await stack.stop() == 0
