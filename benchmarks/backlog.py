"""How fast a backlog drains, and in how much memory, with 1,000 and with 1,000,000 messages waiting.

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

import kit

from headrace.brokers import open_broker
from headrace.clock import SystemClock
from headrace.message import Message, new_id
from headrace.stores import open_store
from headrace.tensor import InferRequest, Tensor, encode_request


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
    signature = SIGNATURE[0]
    for begin in range(0, count, 1000):
        now_ms = clock.now_ms()
        messages = [
            Message(
                id=new_id(now_ms, secret),
                model="tiny",
                signature=signature,
                accepted_at_ms=now_ms,
                header_length=header_length,
                payload=payload,
            )
            for _ in range(min(1000, count - begin))
        ]
        await broker.publish("tiny", messages)
    await broker.close()
    await store.close()


SIGNATURE = [""]


async def answered(data: Path) -> int:
    """Return how many results there are."""
    store = open_store(f"sqlite:///{data}/headrace.db", clock=SystemClock())
    await store.open()
    counts = await store.counts()
    await store.close()
    return counts.succeeded + counts.failed


def drain(data: Path, window: int) -> tuple[float, float, float]:
    """Return results per second over a window, and the memory of the inference process at its start and end."""
    command = [sys.executable, "-m", "headrace", "inference", f"tiny={kit.tiny()}", "--data", str(data)]
    with (kit.HOME / "backlog.log").open("ab") as log:
        process = subprocess.Popen(command, env=settings(data), stdout=log, stderr=log)
    try:
        warm = max(50, window // 10)
        while (done := asyncio.run(answered(data))) < warm:
            if process.poll() is not None:
                sys.exit(f"headrace inference ended with {process.returncode}; see {kit.HOME}/backlog.log")
            time.sleep(0.02)
        begin, first, memory = time.perf_counter(), done, kit.rss_mb(process.pid)
        while (done := asyncio.run(answered(data))) < first + window:
            time.sleep(0.05)
        return (done - first) / (time.perf_counter() - begin), memory, kit.rss_mb(process.pid)
    finally:
        kit.stop(process)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", type=int, default=1_000)
    parser.add_argument("--large", type=int, default=1_000_000)
    parser.add_argument("--window", type=int, default=20_000, help="results that are timed in the large backlog")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    kit.HOME.mkdir(parents=True, exist_ok=True)
    rows = []
    for count, window, runs in ((options.small, 800, options.runs), (options.large, options.window, 1)):
        rates, memory = [], (0.0, 0.0)
        for _ in range(runs):
            data = Path(tempfile.mkdtemp(prefix="data-", dir=kit.HOME))
            begin = time.perf_counter()
            asyncio.run(fill(data, count))
            filled = time.perf_counter() - begin
            for _ in range(options.runs if runs == 1 else 1):
                rate, *sizes = drain(data, window)
                rates.append(rate)
                memory = (sizes[0], sizes[1])
            size_mb = sum(file.stat().st_size for file in data.rglob("*") if file.is_file()) / 2**20
            shutil.rmtree(data)
        every = ", ".join(f"{rate:,.0f}" for rate in rates)
        rows.append([f"{count:,}", f"{count / filled:,.0f}", f"{kit.median(rates):,.0f}", every, *memory, size_mb])
    p50, p99 = kit.fsync_ms(kit.HOME)
    columns = ["waiting", "filled/s", "drained/s", "each run", "RSS MiB at start", "at end", "file MiB"]
    notes = [f"Disk: append 4 KiB + fsync p50 {p50:.2f} ms, p99 {p99:.2f} ms. One inference process, tiny model."]
    kit.table("Draining a backlog", columns, rows, notes)


if __name__ == "__main__":
    main()
