"""Small models that misbehave on order, as python callables: `headrace up python:headrace.testing.models:neg`.

Each takes `x` and gives `y`.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import numpy as np

from headrace.runtimes.python import model

__all__ = ["div", "echo", "echo64", "ids", "kill", "label", "neg", "slow", "text"]

Arrays = dict[str, Any]


@model(inputs={"x": "FP32[-1,3]"}, outputs={"y": "FP32[-1,3]"}, concurrent=True)
def echo(inputs: Arrays) -> Arrays:
    """Return what came, FP32 [-1,3]."""
    return {"y": inputs["x"]}


@model(inputs={"x": "INT64[-1]"}, outputs={"y": "INT64[-1]"}, concurrent=True)
def echo64(inputs: Arrays) -> Arrays:
    """Return what came, INT64 [-1]."""
    return {"y": inputs["x"]}


@model(inputs={"x": "UINT64[-1]"}, outputs={"y": "UINT64[-1]"}, concurrent=True)
def ids(inputs: Arrays) -> Arrays:
    """Return what came, UINT64 [-1]."""
    return {"y": inputs["x"]}


@model(inputs={"x": "BYTES[-1]"}, outputs={"y": "BYTES[-1]"}, concurrent=True)
def text(inputs: Arrays) -> Arrays:
    """Return what came, BYTES [-1]."""
    return {"y": inputs["x"]}


@model(inputs={"x": "FP32[-1,2]"}, outputs={"y": "BYTES[-1]"}, concurrent=True)
def label(inputs: Arrays) -> Arrays:
    """Return a label a row, FP32 [-1,2] to BYTES [-1]: `crème` unless the first value is the smaller, then `猫🐈`."""
    x = inputs["x"]
    return {"y": np.where(x[:, 0] >= x[:, 1], "crème", "猫🐈")}


@model(inputs={"x": "FP32[-1,-1]"}, outputs={"y": "FP32[-1,-1]"}, concurrent=True)
def slow(inputs: Arrays) -> Arrays:
    """Return what came, FP32 [-1,-1], after as many seconds as its first value says."""
    x = inputs["x"]
    if x.size and x.flat[0] > 0:
        threading.Event().wait(float(x.flat[0]))
    return {"y": x}


@model(inputs={"x": "FP32[-1,3]"}, outputs={"y": "FP32[-1,3]"}, concurrent=True)
def neg(inputs: Arrays) -> Arrays:
    """Return what came, FP32 [-1,3], or raise if any value is negative."""
    if (inputs["x"] < 0).any():
        raise ValueError("a value is negative")
    return {"y": inputs["x"]}


@model(inputs={"x": "FP32[-1,-1]"}, outputs={"y": "FP32[-1,-1]"}, concurrent=True)
def kill(inputs: Arrays) -> Arrays:
    """Return what came, FP32 [-1,-1], or SIGKILL the own process if a value is 666."""
    if (inputs["x"] == 666).any():
        os.kill(os.getpid(), signal.SIGKILL)
    return {"y": inputs["x"]}


@model(inputs={"x": "FP32[-1,3]"}, outputs={"y": "FP32[-1,3]"}, concurrent=True)
def div(inputs: Arrays) -> Arrays:
    """Return x/0, FP32 [-1,3]: Infinity, NaN for 0, -Infinity."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return {"y": inputs["x"] / np.float32(0)}
