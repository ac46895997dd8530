from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace.services.rendering import answer_of
from services.kit import ENGINES, FunctionRuntime, road


@pytest.mark.parametrize("engine", ENGINES)
async def test_every_message_gets_its_own_answer(engine: str, tmp_path: Path) -> None:
    async with road(engine, tmp_path) as here:
        ids = await asyncio.gather(*(here.submit(float(n)) for n in range(300)))
        here.inference(FunctionRuntime())
        await here.drained()
        results = await here.store.get(ids)
        assert [answer_of(results[id]).outputs["y"].array.item() for id in ids] == [2.0 * n for n in range(300)]
