"""schemathesis against the served description: nothing that it makes up is a fault of ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from journeys.served import every_datatype, served

pytest.importorskip("schemathesis", reason="pip install schemathesis")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


FLAGS = (
    "--checks not_a_server_error --phases examples,coverage,fuzzing --max-examples 15 --seed 20"
    " --generation-database none --request-timeout 20 --no-color"
).split()


def test_no_request_made_of_the_description_is_answered_5xx(tmp_path: Path) -> None:
    with served(tmp_path, *every_datatype(tmp_path), flags=("--log-level", "warning")) as server:
        done = subprocess.run(
            [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", *FLAGS],
            capture_output=True,
            text=True,
            timeout=150,
            cwd=tmp_path,
        )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "Test cases:" in done.stdout, done.stdout[-2000:]
