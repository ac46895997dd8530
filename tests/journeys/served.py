"""A real `headrace serve` in a process of its own, for clients that know nothing of us."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from journeys.stack import free_port

DATATYPES = "BOOL UINT8 UINT16 UINT32 UINT64 INT8 INT16 INT32 INT64 FP16 FP32 FP64 BF16 BYTES".split()

_EVERY = """from headrace.runtimes.python import model

"""
_ONE = """
@model(inputs={{"x": "{0}[-1,2]"}}, outputs={{"y": "{0}[-1,2]"}}, concurrent=True)
def {1}(inputs):
    return {{"y": inputs["x"]}}
"""


def every_datatype(folder: Path) -> list[str]:
    """Write a model for every datatype, each giving back what it is given; return the MODEL words."""
    text = _EVERY + "".join(_ONE.format(name, name.lower()) for name in DATATYPES)
    (folder / "every_datatype.py").write_text(text)
    return [f"python:every_datatype:{name.lower()}" for name in DATATYPES]


class Served:
    """`headrace serve MODELS`, with its log in a folder."""

    def __init__(self, folder: Path, models: list[str], *flags: str, admin: bool = False) -> None:
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.url = f"http://{self.address}"
        self.admin_port = free_port() if admin else 0
        self.log = folder / "serve.log"
        command = [sys.executable, "-m", "headrace", "serve", *models, "--port", str(self.port), *flags]
        if admin:
            command += ["--admin-port", str(self.admin_port)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=dict(os.environ), cwd=folder)

    def ready(self, timeout_s: float = 60.0) -> None:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            url = f"{self.url}/v2/health/ready"
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return
            time.sleep(0.05)
        raise AssertionError(f"not ready after {timeout_s} s: {self.log.read_text()[-3000:]}")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)


@contextlib.contextmanager
def served(folder: Path, *models: str, flags: tuple[str, ...] = (), admin: bool = False) -> Iterator[Served]:
    """Serve models until the block ends."""
    one = Served(folder, list(models), *flags, admin=admin)
    try:
        one.ready()
        yield one
    finally:
        one.stop()
