from __future__ import annotations

import subprocess
import sys

import pytest

from headrace.services.crashpoints import POINTS, VARIABLE, crash_point


def test_unset_a_point_does_nothing() -> None:
    for name in POINTS:
        crash_point(name, {})(1000)


def test_another_point_does_nothing() -> None:
    crash_point("claimed", {VARIABLE: "acked"})(1000)


@pytest.mark.parametrize("value", ["nowhere", "claimed:0", "claimed:x", "claimed:-1", ":3"])
def test_a_variable_that_means_nothing_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="POINT"):
        crash_point("claimed", {VARIABLE: value})


def test_the_process_dies_when_the_number_is_reached_and_not_before() -> None:
    script = (
        "from headrace.services.crashpoints import crash_point\n"
        "point = crash_point('committed')\n"
        "point(2); print('alive', flush=True); point(1); print('dead', flush=True)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], env={VARIABLE: "committed:3"}, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout) == (-9, "alive\n")
