"""A model that fails in every way that a model can without ending its process; the input picks the way."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

import headrace
from headrace.errors import HeadraceError, InvalidValue, Overloaded


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class OwnCode(HeadraceError):
    """Its own."""

    code = "my_code"


def _cycle() -> dict[str, Any]:
    made: dict[str, Any] = {}
    made["self"] = made
    return made


#: What it raises, and the code that a caller gets.
RAISED: list[tuple[BaseException, str]] = [
    (Exception("\ud800 half a pair"), "model_failed"),
    (Mute(), "model_failed"),
    (KeyboardInterrupt(), "model_failed"),
    (asyncio.CancelledError(), "model_failed"),
    (SystemExit(3), "model_failed"),
    (GeneratorExit(), "model_failed"),
    (HeadraceError("bare"), "model_failed"),
    (OwnCode("own"), "model_failed"),
    (Overloaded("not mine to say"), "model_failed"),
    (InvalidValue(5), "invalid_value"),  # type: ignore[arg-type]
    (InvalidValue("\udcff"), "invalid_value"),
    (InvalidValue("array", details={"seen": np.arange(3), "one": np.float32(2)}), "invalid_value"),
    (InvalidValue("object", details={"seen": object()}), "invalid_value"),
    (InvalidValue("large", details={"seen": 2**80, "nan": float("nan")}), "invalid_value"),
    (InvalidValue("cycle", details=_cycle()), "invalid_value"),
    (InvalidValue("keys", details={1: 2, (1, 2): 3, "\ud800": "\ud800"}), "invalid_value"),  # type: ignore[dict-item]
    (InvalidValue("long" * 10**6), "invalid_value"),
]
#: What it returns after those.
RETURNED: list[Any] = [None, {"y": None}, {}, {"\ud800": 1}, {"y": "text"}, [[1.0, 2.0, 3.0]], object()]


@headrace.model(inputs={"x": "INT64[1]"}, outputs={"y": "FP32[-1]"})
def moods(inputs: dict[str, np.ndarray]) -> Any:
    mood = int(inputs["x"][0]) - 1
    if mood < 0:
        return {"y": np.ones(1, "f4")}
    if mood < len(RAISED):
        raise RAISED[mood][0]
    return RETURNED[mood - len(RAISED)]
