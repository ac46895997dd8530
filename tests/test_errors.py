"""An error can be written and sent, whatever it was made of."""

from __future__ import annotations

import json

import msgspec
import numpy as np

from headrace.errors import ITEMS_MAX, TEXT_CHARS_MAX, InvalidValue, text_of


def test_details_become_what_json_can_hold() -> None:
    cycle: dict[str, object] = {}
    cycle["self"] = cycle
    details = {
        "array": np.arange(3),
        "scalar": np.float32(1.5),
        "large": np.zeros(10**6),
        "object": object(),
        "whole": [2**64 - 1, -(2**63), 2**64],
        "nan": float("nan"),
        "half": "\ud800",
        "cycle": cycle,
        "bytes": b"x",
        (1, 2): True,
        "many": range(3),
        "long": list(range(10 * ITEMS_MAX)),
    }
    error = InvalidValue("\udcff", details=details)  # type: ignore[arg-type]
    assert json.loads(msgspec.json.encode(error.details)) == json.loads(json.dumps(error.details, allow_nan=False))
    found = error.details
    assert (found["array"], found["scalar"], found["large"], found["object"]) == (
        [0, 1, 2],
        1.5,
        "<ndarray>",
        "<object>",
    )
    assert found["whole"] == [2**64 - 1, -(2**63), "an integer of 65 bits"]
    assert (found["nan"], found["half"], found["bytes"], found["(1, 2)"]) == (None, "\\ud800", "<bytes>", True)
    assert len(found["long"]) == ITEMS_MAX
    assert error.message == str(error) == "\\udcff"


def test_a_text_is_a_text_and_not_too_long() -> None:
    class Mute:
        def __str__(self) -> str:
            raise RuntimeError

    assert text_of(Mute()) == "Mute"
    assert text_of("é") == "é"
    assert len(text_of("x" * 10**7)) < TEXT_CHARS_MAX + 50
    assert InvalidValue(5).message == "5"  # type: ignore[arg-type]
    assert InvalidValue().message
