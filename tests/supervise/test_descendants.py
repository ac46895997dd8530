"""What a model started and did not end is ended with the service."""

from __future__ import annotations

import subprocess
import sys

import psutil

PARENT = """
import subprocess, sys, signal
from headrace.supervise import end_descendants
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
kind = "import time; print('up', flush=True); time.sleep(600)"
children = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for code in (deaf, kind)]
for child in children:
    child.stdout.readline()
print(*(child.pid for child in children))
assert end_descendants(0.2) == 2
assert end_descendants(0.2) == 0
"""


def test_a_process_below_is_asked_and_then_killed() -> None:
    done = subprocess.run([sys.executable, "-c", PARENT], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not any(psutil.pid_exists(int(pid)) for pid in done.stdout.split())
