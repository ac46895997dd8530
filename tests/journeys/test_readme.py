"""The README's commands run, as they stand there."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from journeys.stack import free_port, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "tests" / "data" / "iris_logreg.onnx"


def blocks() -> list[str]:
    return re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


class Reader:
    """Someone who types the README into a shell, in a folder with a model.onnx."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.id = folder, free_port(), ""
        self.server: subprocess.Popen[bytes] | None = None
        shutil.copy(MODEL, folder / "model.onnx")

    def at_my_port(self, text: str) -> str:
        return text.replace("localhost:8000", f"127.0.0.1:{self.port}").replace("--port 8000", f"--port {self.port}")

    async def type(self, block: str) -> None:
        for line in re.sub(r"\\\n", " ", block).splitlines():
            command = line.partition("  # ")[0].strip() if not line.startswith("#") else ""
            if command.startswith("headrace ") and command.split()[1] in {"serve", "up"}:
                await self.start(command)
            elif command.startswith("curl"):
                self.ask(command)

    async def start(self, command: str) -> None:
        self.stop()
        text = self.at_my_port(command)
        if "--port" not in text:
            text += f" --port {self.port}"
        arguments = [sys.executable, "-m", "headrace", *text.split()[1:]]
        with (self.folder / "log").open("ab") as log:
            self.server = subprocess.Popen(arguments, cwd=self.folder, stdout=log, stderr=log)
        url = f"http://127.0.0.1:{self.port}/v2/health/ready"
        await until(lambda: subprocess.run(["curl", "-sf", url], capture_output=True).returncode == 0, command)

    def ask(self, command: str) -> None:
        text = self.at_my_port(command).replace("<id>", self.id).replace("curl ", "curl -s ", 1)
        done = subprocess.run(["bash", "-c", text], cwd=self.folder, capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout.rpartition(b"\r\n\r\n")[2])
        assert answer.get("error") is None, answer
        self.id = answer.get("id", self.id)
        if answer.get("status") not in (None, "accepted", "pending"):
            assert answer["status"] == "succeeded"

    def stop(self) -> None:
        if self.server is not None:
            self.server.send_signal(signal.SIGTERM)
            assert self.server.wait(30) == 0
            self.server = None


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    if shutil.which("curl") is None:
        pytest.skip("curl is missing")
    found = Reader(tmp_path)
    yield found
    found.stop()


async def test_the_readme_runs_from_top_to_bottom(reader: Reader) -> None:
    typed = [block for block in blocks() if "headrace " in block or "curl " in block]
    assert len(typed) >= 4
    for block in typed:
        await reader.type(block)
    assert reader.id, "the long road was never tried"


def test_the_readme_names_the_two_commands_of_a_newcomer() -> None:
    assert {"make demo", "make test"} <= {block.strip() for block in blocks()}
