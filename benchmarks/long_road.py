"""The long road end to end, beside Celery and Dramatiq on Redis, in one run on one machine.

A run sends N predictions of the tiny model to a stack that is already up, from 1 or 4 producer processes, and ends when
every result can be read. Headrace is spoken to over HTTP, each producer with 16 requests in flight, and writes every
accepted message to disk (fsync) before its 202; the peers' Redis keeps nothing on disk. Runs are interleaved, and the
median of the runs is printed. Needs redis-server (Debian: apt-get install redis-server) for the peers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import kit

PEERS = kit.HERE / "peers"
IN_FLIGHT = 16
PACKAGES = {"celery": ("celery[redis]",), "dramatiq": ("dramatiq[redis]",)}
WORKERS = {
    "celery": ["-m", "celery", "-A", "celery_app", "worker", "-l", "WARNING"],
    "dramatiq": ["-m", "dramatiq", "dramatiq_app"],
}


class Redis:
    """A private redis-server without persistence."""

    def __init__(self) -> None:
        self.port = kit.free_port()
        self.folder = tempfile.mkdtemp(prefix="redis-", dir=kit.HOME)
        command = [
            "redis-server",
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=self.folder)
        self.url = f"redis://127.0.0.1:{self.port}"
        while self.call("ping") != "PONG":
            time.sleep(0.05)

    def call(self, *command: str) -> str:
        argv = ["redis-cli", "-p", str(self.port), *command]
        return subprocess.run(argv, capture_output=True, text=True).stdout.strip()

    def close(self) -> None:
        kit.stop(self.process)
        shutil.rmtree(self.folder, ignore_errors=True)


class Peer:
    """A task queue's worker, and how to count its results."""

    def __init__(self, name: str, redis: Redis) -> None:
        self.name, self.redis = name, redis
        self.python = kit.peer_python(name, *PACKAGES[name], "onnxruntime", "numpy")
        self.env = {
            "REDIS": redis.url,
            "MODEL": str(kit.tiny()),
            "ROW": json.dumps(kit.row()),
            "OMP_NUM_THREADS": "1",
        }
        log = (kit.HOME / f"{name}.log").open("ab")
        env = {**os.environ, **self.env, "PYTHONPATH": str(PEERS)}
        self.process = subprocess.Popen([self.python, *WORKERS[name]], cwd=PEERS, env=env, stdout=log, stderr=log)

    def producer(self, count: int) -> list[str]:
        return [self.python, str(PEERS / "produce.py"), self.name, str(count), str(IN_FLIGHT)]

    def environ(self) -> dict[str, str]:
        return self.env

    def forget(self) -> None:
        self.redis.call("-n", "1", "flushdb")

    def count(self) -> int:
        return int(self.redis.call("-n", "1", "dbsize") or 0)

    def close(self) -> None:
        kit.stop(self.process)
        self.redis.call("flushall")


class Headrace:
    """`headrace up`, counted in its store, as the peers are in theirs; what was counted is read afterwards."""

    name = "headrace"

    def __init__(self, running: kit.Running) -> None:
        self.running, self.cursor, self.before = running, "", 0
        self.counter = kit.Counter(running.data)

    def producer(self, count: int) -> list[str]:
        return [sys.executable, str(PEERS / "produce.py"), "headrace", str(count), str(IN_FLIGHT)]

    def environ(self) -> dict[str, str]:
        return {"PORT": str(self.running.port)}

    def forget(self) -> None:
        """Read every result there is through the pull route, and end unless each succeeded."""
        read = 0
        while results := self._page():
            failed = [found for found in results if found["status"] != "succeeded"]
            if failed:
                sys.exit(f"a prediction failed: {failed[0]}")
            read += len(results)
        if read != self.count():
            sys.exit(f"{self.count()} results were counted and {read} could be read")
        self.before += read

    def count(self) -> int:
        return self.counter.results() - self.before

    def _page(self) -> list[dict[str, Any]]:
        page = self.running.get(f"/results?after={self.cursor}&limit=1000")
        self.cursor = page["next"]
        found: list[dict[str, Any]] = page["results"]
        return found


@contextlib.contextmanager
def queue(name: str, redis: Redis | None, workers: int) -> Iterator[Headrace | Peer]:
    """Start one queue and wait until it has answered."""
    if name == "headrace":
        with kit.headrace("up", f"tiny={kit.tiny()}", "--workers", str(workers)) as running:
            stack = Headrace(running)
            yield stack
            stack.forget()
        return
    assert redis is not None
    peer = Peer(name, redis)
    try:
        yield peer
    finally:
        peer.close()


def measure(stack: Headrace | Peer, producers: int, count: int) -> dict[str, float]:
    """Return messages per second end to end, and the accept path's latencies."""
    stack.forget()
    together = kit.Together([stack.producer(count // producers) for _ in range(producers)], **stack.environ())
    if isinstance(stack, Peer):  # its producers send one message each before they say they are ready
        while stack.count() < producers:
            time.sleep(0.05)
        stack.forget()
    begin = time.perf_counter()
    together.go()
    while stack.count() < count:
        if time.perf_counter() - begin > 300:
            sys.exit(f"{stack.name}: {stack.count()} of {count} results after 300 s")
        time.sleep(0.01)
    seconds = time.perf_counter() - begin
    said = together.results()
    took = [ms for line in said for ms in line["took_ms"]]
    if len(took) != count:
        sys.exit(f"{stack.name}: {count - len(took)} of {count} were not accepted")
    return {"rate": count / seconds, "p50": kit.percentile(took, 0.5), "p99": kit.percentile(took, 0.99)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=8000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1, help="inference processes of headrace")
    parser.add_argument("--only", default="headrace,celery,dramatiq")
    options = parser.parse_args()
    names = options.only.split(",")
    kit.HOME.mkdir(parents=True, exist_ok=True)
    if set(names) - {"headrace"} and not shutil.which("redis-server"):
        sys.exit("redis-server is missing: apt-get install redis-server, or --only headrace")
    redis = Redis() if set(names) - {"headrace"} else None
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    disk = []
    for run in range(options.runs):
        for name in names:
            disk.append(kit.fsync_ms(kit.HOME))
            with queue(name, redis, options.workers) as stack:
                measure(stack, 1, 200)
                for producers in (1, 4):
                    figures = measure(stack, producers, options.messages)
                    found.setdefault((name, producers), []).append(figures)
                    kit.console.print(f"run {run + 1}: {name}, {producers} producers: {figures['rate']:,.0f}/s")
    if redis:
        redis.close()
    report(names, found, disk)


def report(
    names: list[str], found: dict[tuple[str, int], list[dict[str, float]]], disk: list[tuple[float, float]]
) -> None:
    """Print the medians and the ratios."""
    rates = {key: kit.median([figures["rate"] for figures in runs]) for key, runs in found.items()}
    rows = []
    for (name, producers), runs in found.items():
        ratios = [
            rates[name, producers] / rates[peer, producers] if (peer, producers) in rates else "-"
            for peer in ("celery", "dramatiq")
        ]
        every = ", ".join(f"{figures['rate']:,.0f}" for figures in runs)
        p50, p99 = (kit.median([figures[share] for figures in runs]) for share in ("p50", "p99"))
        rows.append([name, producers, f"{rates[name, producers]:,.0f}", every, p50, p99, *ratios])
    columns = ["", "producers", "messages/s", "each run", "accept p50 ms", "p99 ms", "x Celery", "x Dramatiq"]
    versions = [kit.version(sys.executable, "headrace")]
    versions += [kit.version(kit.peer_python(name, *PACKAGES[name]), name) for name in names if name in PACKAGES]
    p50, p99 = (kit.median([pair[index] for pair in disk]) for index in (0, 1))
    notes = [
        f"Disk: append 4 KiB + fsync p50 {p50:.2f} ms, p99 {p99:.2f} ms. {', '.join(versions)}.",
        f"A headrace producer keeps {IN_FLIGHT} HTTP requests in flight and each 202 is on disk;",
        "the peers' Redis writes nothing to disk.",
    ]
    kit.table("The long road, end to end (accept to result readable), tiny model", columns, rows, notes)


if __name__ == "__main__":
    main()
