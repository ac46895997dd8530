"""What the benchmarks share: the models, the machine, peers in environments of their own, load, and tables."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from headrace.clock import SystemClock
from headrace.stores import open_store

HERE = Path(__file__).resolve().parent
HOME = Path(os.environ.get("BENCH_HOME", HERE.parent / ".bench"))
console = Console(width=150, highlight=False)


def model(name: str, sizes: Sequence[int], seed: int = 0) -> Path:
    """Return an ONNX file of a multilayer perceptron: `x` FP32 [-1, first] → `y` FP32 [-1, last]."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    path = HOME / "models" / f"{name}.onnx"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    rng, nodes, weights, value = np.random.default_rng(seed), [], [], "x"
    for layer, (rows, columns) in enumerate(itertools.pairwise(sizes)):
        weights.append(numpy_helper.from_array((rng.standard_normal((rows, columns)) / rows).astype("f4"), f"w{layer}"))
        weights.append(numpy_helper.from_array(np.zeros(columns, "f4"), f"b{layer}"))
        last = layer == len(sizes) - 2
        nodes.append(helper.make_node("Gemm", [value, f"w{layer}", f"b{layer}"], ["y" if last else f"g{layer}"]))
        if not last:
            nodes.append(helper.make_node("Relu", [f"g{layer}"], [f"h{layer}"]))
            value = f"h{layer}"
    ports = [
        helper.make_tensor_value_info(port, TensorProto.FLOAT, ["N", size])
        for port, size in (("x", sizes[0]), ("y", sizes[-1]))
    ]
    graph = helper.make_graph(nodes, name, ports[:1], ports[1:], weights)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path.with_suffix(".new")
    )
    path.with_suffix(".new").rename(path)
    return path


def tiny() -> Path:
    """Return the tiny model, 128-64-10: what is measured is everything but the model."""
    return model("tiny", (128, 64, 10))


def row(size: int = 128) -> list[float]:
    """Return one input row."""
    return [round(float(value), 6) for value in np.random.default_rng(7).standard_normal(size)]


def machine() -> str:
    """Return the machine in one line."""
    cpu = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    memory = psutil.virtual_memory().total / 2**30
    kernel = os.uname().release.split("-")[0]
    name = cpu[1] if cpu else os.uname().machine
    cores = len(os.sched_getaffinity(0))
    return f"{name}, {cores} cores, {memory:.0f} GiB, kernel {kernel}, Python {sys.version.split()[0]}"


def fsync_ms(folder: Path, count: int = 200) -> tuple[float, float]:
    """Return p50 and p99 of appending 4 KiB and fsync, in the folder where the data will be."""
    took = []
    with (folder / "fsync").open("wb", buffering=0) as file:
        for _ in range(count):
            file.write(b"\0" * 4096)
            start = time.perf_counter()
            os.fsync(file.fileno())
            took.append((time.perf_counter() - start) * 1e3)
    (folder / "fsync").unlink()
    return percentile(took, 0.5), percentile(took, 0.99)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that `share` of `values` stay under."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] if values else float("nan")


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(values) if values else float("nan")


def free_port() -> int:
    """Return a port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rss_mb(pid: int) -> float:
    """Return the resident memory of a process and its children, in MiB."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    total = 0
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total / 2**20


def peer_python(name: str, *packages: str) -> str:
    """Return the python of a peer's own environment, made on first use."""
    folder = HOME / "peers" / name
    if not (folder / ".ready").exists():
        console.print(f"making an environment for {name}: {' '.join(packages)}")
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip = [
            folder / "bin" / "python",
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            *packages,
        ]
        subprocess.run(pip, check=True)
        (folder / ".ready").touch()
    return str(folder / "bin" / "python")


def version(python: str, package: str) -> str:
    """Return `package x.y.z` as installed for that python."""
    ask = f"import importlib.metadata as m; print(m.version({package!r}))"
    return f"{package} {subprocess.run([python, '-c', ask], capture_output=True, text=True, check=True).stdout.strip()}"


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children, kindly first."""
    family = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(20)
    for child in [*family]:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    if process.poll() is None:
        process.kill()
        process.wait()


@contextlib.contextmanager
def headrace(command: str, spec: str, *flags: str, folder: Path | None = None, **environ: str) -> Iterator[Running]:
    """Run `headrace up` or `serve` until the block ends; its data is removed unless a folder is given."""
    data = folder or Path(tempfile.mkdtemp(prefix="data-", dir=_made(HOME)))
    port = free_port()
    keeps = ["--data", str(data)] if command == "up" else []
    argv = [sys.executable, "-m", "headrace", command, spec, "--port", str(port), *keeps, *flags]
    with (HOME / f"{command}.log").open("ab") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log, env={**os.environ, **environ})
    running = Running(process, port, data)
    try:
        running.wait_ready()
        yield running
    finally:
        stop(process)
        if folder is None:
            shutil.rmtree(data, ignore_errors=True)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Running:
    """A server that was started here."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, data: Path) -> None:
        self.process, self.port, self.data = process, port, data

    def wait_ready(self, path: str = "/v2/health/ready", timeout_s: float = 60) -> None:
        """Return when it answers 200."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if self.process.poll() is not None:
                sys.exit(f"the server ended with {self.process.returncode}; see {HOME}/*.log")
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5),
            ):
                return
            time.sleep(0.05)
        sys.exit("the server did not become ready")

    def get(self, path: str) -> Any:
        """Return the decoded body of a GET."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            return json.load(answer)


class Counter:
    """Counts the results in a data folder from outside, with one read that costs the stack nothing."""

    def __init__(self, data: Path) -> None:
        self._runner = asyncio.Runner()
        self._store = open_store(f"sqlite:///{data}/headrace.db", clock=SystemClock())
        self._runner.run(self._store.open())

    def results(self) -> int:
        """Return how many messages have their result."""
        counts = self._runner.run(self._store.counts())
        return counts.succeeded + counts.failed

    def close(self) -> None:
        """Close the store."""
        self._runner.run(self._store.close())
        self._runner.close()


def request_bytes(port: int, path: str, body: bytes, **headers: str) -> bytes:
    """Return a keep-alive POST, ready to be sent again and again."""
    lines = [f"POST {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", "Content-Type: application/json"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


class Producer:
    """Keeps a number of requests in flight, one on each keep-alive connection, from one thread of its own process."""

    def __init__(self, port: int, in_flight: int, request: bytes, status: int) -> None:
        self.request, self.status = request, status
        self.sockets = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(in_flight)]
        for connection in self.sockets:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def run(self, count: int, seconds: float = float("inf")) -> tuple[list[float], int]:
        """Send `count` requests, or as many as fit in `seconds`; return latencies (ms) and other statuses."""
        pool, took, other = select.epoll(), list[float](), 0
        by_fd = {connection.fileno(): connection for connection in self.sockets}
        todo, now = count, time.perf_counter
        end = now() + seconds
        wanted = b"HTTP/1.1 %d" % self.status
        begun: dict[int, float] = {}
        parts: dict[int, bytes] = {}
        for fd, connection in by_fd.items():
            pool.register(fd, select.EPOLLIN)
            if todo > 0:
                begun[fd] = now()
                connection.sendall(self.request)
                todo -= 1
        while begun:
            for fd, _ in pool.poll(60):
                connection = by_fd[fd]
                data = connection.recv(65536)
                if not data:
                    sys.exit("the server closed a connection in the middle")
                if parts:
                    data = parts.pop(fd, b"") + data
                if not _is_whole(data):
                    parts[fd] = data
                    continue
                if data.startswith(wanted):
                    took.append((now() - begun.pop(fd)) * 1e3)
                else:
                    begun.pop(fd)
                    other += 1
                if todo > 0 and now() < end:
                    begun[fd] = now()
                    connection.sendall(self.request)
                    todo -= 1
        return took, other


def _is_whole(data: bytes) -> bool:
    """Return whether an answer with a length is all here."""
    gap = data.find(b"\r\n\r\n")
    if gap < 0:
        return False
    name = data.find(b"ontent-", 0, gap)
    while name >= 0 and data[name + 7 : name + 13].lower() != b"length":
        name = data.find(b"ontent-", name + 7, gap)
    length = int(data[name + 14 : data.index(b"\r", name)]) if name >= 0 else 0
    return len(data) >= gap + 4 + length


class Together:
    """Several producer processes that start at the same moment."""

    def __init__(self, argvs: Sequence[Sequence[str]], **environ: str) -> None:
        env = {**os.environ, "PYTHONPATH": str(HERE), **environ}
        self.processes = [
            subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) for argv in argvs
        ]
        for process in self.processes:
            assert process.stdout is not None
            if process.stdout.readline().strip() != "ready":
                sys.exit(f"a producer did not start: {process.args}")

    def go(self) -> None:
        """Let all of them begin."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()

    def results(self) -> list[dict[str, Any]]:
        """Wait for all; return what each printed as its last line."""
        lines: list[dict[str, Any]] = []
        threads = [
            threading.Thread(target=lambda p=p: lines.append(json.loads(p.communicate()[0].splitlines()[-1])))
            for p in self.processes
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return lines


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], notes: Sequence[str] = ()) -> None:
    """Print a table with the machine under it, for people and for docs."""
    shown = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        shown.add_column(column, justify="left" if index == 0 else "right")
    for cells in rows:
        shown.add_row(*[f"{cell:,.2f}" if isinstance(cell, float) else str(cell) for cell in cells])
    console.print(shown)
    for note in (f"Machine: {machine()}", f"Date: {time.strftime('%Y-%m-%d')}", *notes):
        console.print(note)
