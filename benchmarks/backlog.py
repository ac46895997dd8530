"""How fast a backlog drains, and in how much memory, with 1,000, 25,000 and 1,000,000 messages waiting.

The messages are published straight into the topic, by the product's own code, while no inference runs; then
`headrace inference` is started and timed over a window of results, with what is left waiting behind it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import kit

from headrace.brokers import open_broker
from headrace.clock import SystemClock
from headrace.message import Message, new_id
from headrace.stores import open_store
from headrace.tensor import Datatype, InferRequest, Signature, Tensor, TensorSpec, encode_request


def settings(data: Path) -> dict[str, str]:
    return {**os.environ, "HEADRACE_DATA": str(data), "HEADRACE_INGEST_QUEUE_LENGTH_MAX": "2000000"}


async def fill(data: Path, count: int) -> None:
    """Publish `count` messages of one row each."""
    clock = SystemClock()
    url = f"sqlite:///{data}/headrace.db"
    broker = open_broker(url, clock=clock, length_max=2_000_000, bytes_max=2**40)
    store = open_store(url, clock=clock)
    await broker.open()
    await store.open()
    secret = await store.secret("ids")
    request = InferRequest(model="tiny", inputs={"x": Tensor.of(kit.np.asarray([kit.row()], "f4"))})
    payload, header_length = encode_request(request)
    signature = Signature((TensorSpec("x", Datatype.FP32, (-1, 128)),), (TensorSpec("y", Datatype.FP32, (-1, 10)),))
    for begin in range(0, count, 1000):
        now_ms = clock.now_ms()
        messages = [
            Message(
                id=new_id(now_ms, secret),
                model="tiny",
                signature=signature.digest,
                accepted_at_ms=now_ms,
                header_length=header_length,
                payload=payload,
            )
            for _ in range(min(1000, count - begin))
        ]
        await broker.publish("tiny", messages)
    await broker.close()
    await store.close()


def drain(data: Path, window: int) -> tuple[float, float, float]:
    """Return results per second over a window, and the memory of the inference process at its start and end."""
    command = [sys.executable, "-m", "headrace", "inference", f"tiny={kit.tiny()}", "--data", str(data)]
    with (kit.HOME / "backlog.log").open("ab") as log:
        process = subprocess.Popen(command, env=settings(data), stdout=log, stderr=log)
    counter = kit.Counter(data)
    try:
        before = counter.results()
        while (first := counter.results()) < before + window // 10:
            if process.poll() is not None:
                sys.exit(f"headrace inference ended with {process.returncode}; see {kit.HOME}/backlog.log")
            time.sleep(0.002)
        begin, memory = time.perf_counter(), kit.rss_mb(process.pid)
        while (done := counter.results()) < first + window:
            time.sleep(0.002)
        return (done - first) / (time.perf_counter() - begin), memory, kit.rss_mb(process.pid)
    finally:
        counter.close()
        kit.stop(process)


class Backlog:
    """A topic with so many messages waiting, and what its drains showed."""

    def __init__(self, count: int) -> None:
        self.count, self.rates = count, list[float]()
        self.memory = (0.0, 0.0)
        self.data = Path(tempfile.mkdtemp(prefix="data-", dir=kit.HOME))
        begin = time.perf_counter()
        asyncio.run(fill(self.data, count))
        # What the filling left to the kernel is not the draining's to wait for.
        os.sync()
        self.filled_s = time.perf_counter() - begin

    def drain(self, window: int) -> None:
        """Time one window."""
        rate, *memory = drain(self.data, window)
        self.rates.append(rate)
        self.memory = (memory[0], memory[1])

    def row(self, window: int, base: list[float]) -> list[Any]:
        """Return the row of the table; `base` are the rates that these are compared with, pair by pair."""
        every = ", ".join(f"{rate:,.0f}" for rate in self.rates)
        ratio = kit.median([rate / other for rate, other in zip(self.rates, base, strict=True)])
        rate = f"{kit.median(self.rates):,.0f}"
        return [
            f"{self.count:,}",
            f"{self.count / self.filled_s:,.0f}",
            f"{window:,}",
            rate,
            every,
            ratio,
            *self.memory,
        ]

    def close(self) -> None:
        """Remove the data."""
        shutil.rmtree(self.data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", type=int, default=1_000_000)
    parser.add_argument("--window", type=int, default=20_000, help="results that are timed")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    if options.large < 2 * options.runs * options.window:
        parser.error(f"--large must hold {options.runs} windows of {options.window}, twice")
    kit.HOME.mkdir(parents=True, exist_ok=True)
    large = Backlog(options.large)
    large.drain(options.window)
    large.rates.clear()
    sizes = {1_000: 800, options.window * 5 // 4: options.window}
    small = {count: list[Backlog]() for count in sizes}
    # Interleaved, since the speed of a machine wanders.
    for _ in range(options.runs):
        for count, window in sizes.items():
            backlog = Backlog(count)
            backlog.drain(window)
            backlog.close()
            small[count].append(backlog)
        large.drain(options.window)
    large.close()
    base = [backlog.rates[0] for backlog in small[options.window * 5 // 4]]
    rows = []
    for count, runs in small.items():
        runs[-1].rates = [run.rates[0] for run in runs]
        rows.append(runs[-1].row(sizes[count], base))
    rows.append(large.row(options.window, base))
    p50, p99 = kit.fsync_ms(kit.HOME)
    columns = ["waiting", "filled/s", "timed", "drained/s", "each run", "ratio", "RSS MiB at start", "at end"]
    notes = [
        f"Disk: append 4 KiB + fsync p50 {p50:.2f} ms, p99 {p99:.2f} ms. One inference process, tiny model.",
        "Ratio: median over the runs, each to its neighbour of the second row. 1,000 are drained before the first",
        "checkpoint of the WAL: a sprint, not a pace.",
    ]
    kit.table("Draining a backlog", columns, rows, notes)


if __name__ == "__main__":
    main()
