"""The long road in one minute: a real model, real files, a kill -9 in the middle, and every answer counted.

The model is magika (Apache-2.0, shipped in its PyPI package): it looks at the bytes of a file and names its type.
The inputs are files of this machine. `make demo` runs this; `--exit` stops at the end, with 1 if a message was
lost or doubled.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

MESSAGES = 400
WORKERS = 2
HERE = Path(__file__).resolve().parents[1]
console = Console(highlight=False)


def magika_folder() -> Path:
    """Return the folder of the model; the package itself is not imported, only its files are used."""
    spec = importlib.util.find_spec("magika")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("The demo's model is missing: pip install --no-deps magika==1.0.3 (or run `make demo`)")
    return Path(spec.submodule_search_locations[0]) / "models" / "standard_v3_3"


def features(data: bytes) -> list[int]:
    """Return the model's input for a file's bytes: INT32 [2048], the first and the last 1024 bytes, 256 is padding."""
    begin, end = data[:4096].lstrip()[:1024], data[-4096:].rstrip()[-1024:]
    return [*begin, *[256] * (1024 - len(begin)), *[256] * (1024 - len(end)), *end]


def real_files(count: int) -> list[Path]:
    """Return files of many kinds that are on every machine with Python: sources, tables, text, libraries."""
    places = [HERE, Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))]
    by_kind: dict[str, list[Path]] = {}
    for place in places:
        for path in sorted(place.rglob("*"))[:20_000]:
            if path.is_file() and path.stat().st_size > 64 and not {".git", ".demo"} & set(path.parts):
                by_kind.setdefault(path.suffix, []).append(path)
    files: list[Path] = []
    while len(files) < count and any(by_kind.values()):
        files += [paths.pop() for paths in by_kind.values() if paths]
    return files[:count]


def free_port(wanted: int) -> int:
    """Return `wanted` if nobody listens there, else any free port."""
    for port in (wanted, 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise SystemExit("no free port")


class Client:
    """The few HTTP calls of the demo."""

    def __init__(self, url: str) -> None:
        self.url = url

    def call(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Send a request; return the status and the decoded JSON body."""
        data = None if body is None else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json", **named})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def wait_ready(self, up: subprocess.Popen[bytes]) -> None:
        """Return when the stack can take messages."""
        for _ in range(600):
            if up.poll() is not None:
                sys.exit(f"headrace up ended with {up.returncode}; its log is above")
            with contextlib.suppress(OSError, ValueError):
                if self.call("/v2/health/ready")[0] == 200:
                    return
            time.sleep(0.1)
        sys.exit("the stack did not become ready within a minute")


class Tally:
    """What was accepted and what came back, seen through the pull route."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.sent_at: dict[str, float] = {}
        self.latency_s: dict[str, float] = {}
        self.seen: Counter[str] = Counter()
        self.labels: dict[str, Any] = {}
        self.failed: set[str] = set()
        self.files: dict[str, Path] = {}

    def submit(self, path: Path) -> None:
        """Send one file as a message; note its id."""
        data = [features(path.read_bytes())]
        body = {"inputs": [{"name": "bytes", "shape": [1, 2048], "datatype": "INT32", "data": data}]}
        start = time.monotonic()
        status, answer = self.client.call("/v2/models/filetype/infer", body, Prefer="respond-async")
        if status != 202:
            sys.exit(f"not accepted: {status} {answer}")
        self.sent_at[answer["id"]] = start
        self.files[answer["id"]] = path

    def follow(self, stop: threading.Event) -> None:
        """Read results in commit order until told to stop."""
        cursor = ""
        while not stop.is_set():
            try:
                status, page = self.client.call(f"/results?after={cursor}&limit=100")
            except OSError:
                status, page = 0, None
            if status != 200 or not page["results"]:
                stop.wait(0.02)
                continue
            cursor = page["next"]
            for found in page["results"]:
                self.note(found)

    def note(self, found: dict[str, Any]) -> None:
        """Count one finished request."""
        name = found["id"]
        self.seen[name] += 1
        self.latency_s.setdefault(name, time.monotonic() - self.sent_at.get(name, time.monotonic()))
        if found["status"] == "succeeded":
            self.labels[name] = found["result"]["outputs"][0]["data"]
        else:
            self.failed.add(name)


def kill_one(up: subprocess.Popen[bytes]) -> int:
    """Send SIGKILL to one inference process; return its pid."""
    children = psutil.Process(up.pid).children(recursive=True)
    victims = [child for child in children if "inference" in child.cmdline()]
    victims[0].send_signal(signal.SIGKILL)
    return victims[0].pid


def run(client: Client, up: subprocess.Popen[bytes], labels: list[str]) -> bool:
    """Submit, kill, wait, print; return whether every message has exactly one answer."""
    files = real_files(MESSAGES)
    tally, stop = Tally(client), threading.Event()
    follower = threading.Thread(target=tally.follow, args=(stop,), daemon=True)
    follower.start()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(tally.submit, files[: MESSAGES // 2]))
        victim = kill_one(up)
        console.print(f"  kill -9 {victim} (an inference process) after {MESSAGES // 2} of {len(files)} messages")
        list(pool.map(tally.submit, files[MESSAGES // 2 :]))
    deadline = time.monotonic() + 60
    while set(tally.seen) != set(tally.sent_at) and time.monotonic() < deadline:
        time.sleep(0.05)
    stop.set()
    follower.join()
    return report(client, tally, labels)


def report(client: Client, tally: Tally, labels: list[str]) -> bool:
    """Print what was seen; each id is also asked for by itself."""
    unanswered = [name for name in tally.sent_at if client.call(f"/requests/{name}")[1].get("status") != "succeeded"]
    doubled = [name for name, count in tally.seen.items() if count > 1]
    sample = Table(title="Some answers", title_justify="left")
    for heading in ("file", "the model says", "score"):
        sample.add_column(heading)
    for name in list(tally.labels)[:: max(1, len(tally.labels) // 8)][:8]:
        scores = tally.labels[name]
        best = max(range(len(scores)), key=scores.__getitem__)
        sample.add_row(tally.files[name].name[-40:], labels[best], f"{scores[best]:.4f}")
    console.print(sample)
    waits = sorted(tally.latency_s.values())
    table = Table(title="The count", title_justify="left")
    for heading in ("accepted", "answered", "failed", "lost", "doubled", "latency p50", "p99"):
        table.add_column(heading, justify="right")
    p50, p99 = (f"{waits[int(len(waits) * share)]:.2f} s" if waits else "-" for share in (0.5, 0.99))
    counts = (len(tally.sent_at), len(tally.seen), len(tally.failed), len(unanswered), len(doubled))
    table.add_row(*map(str, counts), p50, p99)
    console.print(table)
    return bool(tally.sent_at) and not unanswered and not doubled and not tally.failed


def main() -> int:
    """Run the demo; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--exit", action="store_true", help="stop at the end instead of serving on")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    folder = magika_folder()
    labels = json.loads((folder / "config.min.json").read_text())["target_labels_space"]
    # Asked to end by whatever ran it, it ends what it started, as after Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # A folder of its own for each run: another demo may still serve from the last one's.
    (HERE / ".demo").mkdir(exist_ok=True)
    data = Path(tempfile.mkdtemp(prefix="run-", dir=HERE / ".demo"))
    url = f"http://127.0.0.1:{free_port(options.port)}"
    model = f"filetype={folder / 'model.onnx'}"
    command = [sys.executable, "-m", "headrace", "up", model, "--data", str(data / "data")]
    command += ["--port", url.rsplit(":", 1)[1], "--workers", str(WORKERS)]
    console.print("[bold]headrace up filetype=model.onnx[/bold]: ingest, 2 inference processes, delivery")
    with (data / "up.log").open("wb") as log:
        up = subprocess.Popen(command, stderr=log, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    client = Client(url)
    try:
        client.wait_ready(up)
        good = run(client, up, labels)
        console.print(f"\nThe log: {data / 'up.log'}")
        if not options.exit:
            example = data / "example.json"
            example.write_text(json.dumps({"data": [features(Path(__file__).read_bytes())]}))
            headrace = Path(sys.executable).parent / "headrace"
            console.print(f"Try:  curl {url}/health\n      curl '{url}/results?limit=1'\n      open {url}/docs")
            console.print(f"      {headrace} submit filetype -i {example} --url {url}", soft_wrap=True)
            console.print("Serving until Ctrl-C.")
            with contextlib.suppress(KeyboardInterrupt):
                up.wait()
    finally:
        if up.poll() is None:
            up.send_signal(signal.SIGTERM)
        code = up.wait(30)
        shutil.rmtree(data / "data", ignore_errors=True)
    if code != 0:
        console.print(f"headrace up ended with {code}, see {data / 'up.log'}")
    return 0 if good and code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
