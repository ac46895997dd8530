"""`headrace serve` beside the servers that people use today: the same models, bodies and client, in one run.

Each server runs alone, in an environment of its own, on the same two models: a tiny one and one that takes about 5 ms.
Runs are interleaved, and medians are shown. Every server has one inference worker with one thread and, where it has
them, batches of up to 16 with its wait of 5 ms (mosec also with 1 ms); otherwise defaults, logs included. Before the
load each answer is compared with onnxruntime's. Needs wrk (Debian: apt-get install wrk).
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

import kit
import numpy as np
import psutil
from servers import MODELS, SERVERS, Model, Started, python_of

CONNECTIONS = (1, 16, 64)
_LUA = """
local file = assert(io.open("{body}", "rb"))
wrk.method, wrk.body = "POST", file:read("*a")
wrk.headers["Content-Type"] = "application/json"
function done(summary, latency)
  local errors = summary.errors
  io.write(string.format("FOUND %d %d %.4f %.4f %d\\n", summary.requests, summary.duration,
    latency:percentile(50) / 1000, latency:percentile(99) / 1000,
    errors.status + errors.timeout + errors.connect + errors.read + errors.write))
end
"""


def expected(model: Model) -> list[float]:
    """Return what onnxruntime says to the row that every server is asked."""
    import onnxruntime

    session = onnxruntime.InferenceSession(model.path, providers=["CPUExecutionProvider"])
    found: list[float] = session.run(None, {"x": np.asarray([kit.row(model.sizes[0])], "f4")})[0][0].tolist()
    return found


def wait_right(started: Started, body: bytes, right: list[float], timeout_s: float = 180) -> None:
    """Return when the server answers, and answers right; end where it does not."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{started.port}{started.server.path}", body, {"Content-Type": "application/json"}
    )
    end, last = time.monotonic() + timeout_s, ""
    while time.monotonic() < end:
        if started.process.poll() is not None:
            sys.exit(f"the server ended with {started.process.returncode}; see {kit.HOME}/*.log")
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                found = json.load(answer)
        except (OSError, ValueError) as error:
            last = str(error)
            time.sleep(0.1)
            continue
        if started.server.answer is not None:
            np.testing.assert_allclose(np.ravel(started.server.answer(found)), right, rtol=1e-3, atol=1e-4)
        return
    sys.exit(f"the server did not become ready: {last}")


def family(pid: int) -> list[psutil.Process]:
    """Return a process and all below it."""
    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]


def cpu_s(processes: list[psutil.Process]) -> float:
    """Return the CPU time that they have used."""
    total = 0.0
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def load(started: Started, script: str, connections: int, seconds: int) -> dict[str, float]:
    """Return what wrk measured, and what the server used meanwhile."""
    url = f"http://127.0.0.1:{started.port}{started.server.path}"
    argv = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--timeout", "10s", "--latency", "-s", script, url]
    processes = family(started.process.pid)
    before = cpu_s(processes)
    said = subprocess.run(argv, capture_output=True, text=True)
    used = cpu_s(processes) - before
    found = re.search(r"FOUND (\d+) (\d+) ([\d.]+) ([\d.]+) (\d+)", said.stdout)
    if found is None:
        sys.exit(f"wrk: {said.stdout}{said.stderr}")
    count, took_us, p50, p99, errors = (float(group) for group in found.groups())
    return {
        "rate": (count - errors) / (took_us / 1e6),
        "p50": p50,
        "p99": p99,
        "errors": errors,
        "cpu_us": used / max(count, 1) * 1e6,
        "mb": kit.rss_mb(started.process.pid),
    }


Key = tuple[str, str, int]


def measure(name: str, model: Model, seconds: int, found: dict[Key, list[dict[str, float]]]) -> None:
    """Start one server, load it at every number of connections, end it."""
    started = Started(name, model)
    try:
        body = kit.HOME / f"{name}-{model.name}.json"
        body.write_text(json.dumps(started.server.body(kit.row(model.sizes[0]))))
        script = kit.HOME / f"{name}-{model.name}.lua"
        script.write_text(_LUA.replace("{body}", str(body)))
        wait_right(started, body.read_bytes(), expected(model))
        load(started, str(script), 8, 1)
        for connections in CONNECTIONS:
            figures = load(started, str(script), connections, seconds)
            found.setdefault((model.name, name, connections), []).append(figures)
            kit.console.print(f"{model.name}, {name}, {connections} connections: {figures['rate']:,.0f}/s")
    finally:
        started.close()


def report(model: Model, names: list[str], found: dict[Key, list[dict[str, float]]]) -> None:
    """Print medians, and headrace's ratio to each."""
    middle: dict[Key, dict[str, float]] = {
        key: {figure: kit.median([run[figure] for run in runs]) for figure in runs[0]} for key, runs in found.items()
    }
    rows: list[list[Any]] = []
    for connections in CONNECTIONS:
        ours = middle.get((model.name, "headrace", connections))
        for name in names:
            one = middle[model.name, name, connections]
            ratio = ours["rate"] / one["rate"] if ours and one["rate"] else "-"
            rates = [f"{run['rate']:,.0f}" for run in found[model.name, name, connections]]
            whole = [f"{one[figure]:,.0f}" for figure in ("cpu_us", "mb", "errors")]
            rows.append(
                [name, connections, f"{one['rate']:,.0f}", ", ".join(rates), one["p50"], one["p99"], *whole, ratio]
            )
    columns = ["", "connections", "requests/s", "each run", "p50 ms", "p99 ms", "CPU us", "RSS MiB", "errors"]
    versions = [kit.version(sys.executable, "headrace")]
    for name in names:
        packages = SERVERS[name].packages
        if packages:
            package = re.split(r"[\[<>=]", packages[0])[0]
            versions.append(kit.version(python_of(name), package))
    notes = [f"{', '.join(dict.fromkeys(versions))}.", bare(model)]
    kit.table(f"The short road, JSON, {model.name} model", [*columns, "headrace x"], rows, notes)


def bare(model: Model) -> str:
    """Return how fast the runtime itself is, without a server, on one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.path, options, providers=["CPUExecutionProvider"])
    said = []
    for batch in (1, 16):
        rows = np.asarray([kit.row(model.sizes[0])] * batch, "f4")
        count, begin = 0, time.perf_counter()
        while time.perf_counter() < begin + 1:
            session.run(None, {"x": rows})
            count += batch
        said.append(f"{count / (time.perf_counter() - begin):,.0f} rows/s in batches of {batch}")
    return f"The bare runtime on one thread: {', '.join(said)}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=4)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--only", default=",".join(SERVERS), help="servers, separated by commas")
    options = parser.parse_args()
    if shutil.which("wrk") is None:
        sys.exit("wrk is missing: apt-get install wrk")
    kit.HOME.mkdir(parents=True, exist_ok=True)
    names = options.only.split(",")
    found: dict[Key, list[dict[str, float]]] = {}
    for name in names:
        python_of(name)
    for model in (MODELS[name] for name in options.models.split(",")):
        for _ in range(options.runs):
            for name in names:
                measure(name, model, options.seconds, found)
        report(model, names, found)


if __name__ == "__main__":
    main()
