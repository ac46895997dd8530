"""TorchScript, SavedModel and frozen graph behind the real `headrace up`: the same door, and the same refusals."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from journeys.stack import Stack, until
from runtimes import torch_models

pytest.importorskip("torch", reason="needs torch: pip install 'headrace[torch]'")
pytest.importorskip("tensorflow", reason="needs tensorflow: pip install 'headrace[tensorflow]'")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

DATA = Path(__file__).parents[1] / "data"
ROWS = json.loads((DATA / "digits_rows.json").read_text())
NewStack = Callable[..., Stack]


def images() -> Any:
    return np.array(ROWS["pixels"], np.float32).reshape(-1, 8, 8, 1) / 16


async def test_three_formats_answer_sixty_callers_at_once_and_again_after_a_kill(
    new_stack: NewStack, tmp_path: Path
) -> None:
    models = [str(torch_models.digits(tmp_path)), f"saved={DATA / 'digits_sm'}", f"frozen={DATA / 'digits_frozen.pb'}"]
    stack = new_stack(*models)
    stack.start()
    await stack.ready(120)
    given = {
        "digits": np.array(ROWS["pixels"], np.float32).tolist(),
        "saved": images().tolist(),
        "frozen": images().tolist(),
    }

    async def ask() -> dict[str, list[int]]:
        async with stack.http() as http:

            async def one(model: str, row: Any) -> int:
                async with http.post(f"/predict/{model}", json={"data": [row]}) as answer:
                    said = await answer.json()
                    assert answer.status == 200, said
                    return int(np.argmax(said["prediction"][0]))

            found = {}
            for model, rows in given.items():
                found[model] = await asyncio.gather(*(one(model, row) for row in rows))
            async with http.post("/predict/saved", json={"data": [[[[0.0]] * 9] * 9]}) as wrong:
                assert wrong.status == 400 and (await wrong.json())["code"] == "shape_mismatch"
            return found

    first = await ask()
    assert first["saved"] == first["frozen"]
    for labels in first.values():
        assert sum(label == digit for label, digit in zip(labels, ROWS["digits"], strict=True)) >= 55
    (before,) = stack.pids("inference")
    stack.kill("inference")
    await until(lambda: stack.pids("inference") not in ([], [before]), "another inference process")
    assert await ask() == first
    assert await stack.stop() == 0


def test_a_pickle_by_another_name_is_refused_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "m.pt").write_bytes(pickle.dumps({"weight": 1}))
    (tmp_path / "x.json").write_text('{"data": [[1]]}')
    command = [sys.executable, "-m", "headrace", "predict", "m.pt", "-i", "x.json"]
    done = subprocess.run(command, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, timeout=100)
    assert done.returncode != 0
    assert "it is a pickle" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
