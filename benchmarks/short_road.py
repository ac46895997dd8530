"""`POST /predict` with the tiny model at 1, 16 and 64 connections, beside a hand-written FastAPI server and mosec.

Each server runs alone, one after another, in several interleaved rounds; the client is one process with one request in
flight on each keep-alive connection, on the same machine. Access logs and metrics of headrace are on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import kit

PEERS = kit.HERE / "peers"
PACKAGES = {
    "naive": ("fastapi", "uvicorn[standard]", "onnxruntime", "numpy"),
    "mosec": ("mosec", "onnxruntime", "numpy"),
}
CONNECTIONS = (1, 16, 64)


@contextlib.contextmanager
def server(name: str) -> Iterator[kit.Running]:
    """Start one server and wait until it answers."""
    if name == "headrace":
        with kit.headrace("serve", f"tiny={kit.tiny()}") as running:
            yield running
        return
    python, port = kit.peer_python(name, *PACKAGES[name]), kit.free_port()
    argv = {
        "naive": ["-m", "uvicorn", "naive_app:app", "--port", str(port)],
        "mosec": ["mosec_app.py", "--port", str(port), "--address", "127.0.0.1"],
    }[name]
    env = {**os.environ, "MODEL": str(kit.tiny()), "OMP_NUM_THREADS": "1"}
    with (kit.HOME / f"{name}.log").open("wb") as log:
        process = subprocess.Popen([python, *argv], cwd=PEERS, env=env, stdout=log, stderr=log)
    running = kit.Running(process, port, kit.HOME)
    try:
        running.wait_ready({"naive": "/openapi.json", "mosec": "/"}[name])
        yield running
    finally:
        kit.stop(process)


def load(port: int, connections: int, seconds: float) -> dict[str, float]:
    """Return requests per second and latencies of one spell of load, from a process of its own."""
    argv = [
        sys.executable,
        str(kit.HERE / "short_road.py"),
        "--client",
        str(port),
        str(connections),
        str(seconds),
    ]
    found: dict[str, float] = json.loads(subprocess.run(argv, check=True, capture_output=True).stdout)
    return found


def client(port: int, connections: int, seconds: float) -> None:
    """Be the load; print the figures as one JSON line."""
    body = json.dumps({"data": [kit.row()]}).encode()
    producer = kit.Producer(port, connections, kit.request_bytes(port, "/predict", body), 200)
    took, other = producer.run(10**9, seconds)
    if not took:
        sys.exit(f"none of {other} answers was a 200")
    figures = {
        "rate": len(took) / seconds,
        "p50": kit.percentile(took, 0.5),
        "p99": kit.percentile(took, 0.99),
    }
    json.dump({**figures, "other": other}, sys.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", default="headrace,naive,mosec")
    parser.add_argument("--client", nargs=3, metavar=("PORT", "CONNECTIONS", "SECONDS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        client(int(options.client[0]), int(options.client[1]), float(options.client[2]))
        return
    kit.HOME.mkdir(parents=True, exist_ok=True)
    names = options.only.split(",")
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    for _ in range(options.runs):
        for name in names:
            with server(name) as running:
                load(running.port, 4, 1)
                for connections in CONNECTIONS:
                    figures = load(running.port, connections, options.seconds)
                    found.setdefault((name, connections), []).append(figures)
                    kit.console.print(f"{name}, {connections} connections: {figures['rate']:,.0f}/s")
    report(names, found)


def report(names: list[str], found: dict[tuple[str, int], list[dict[str, float]]]) -> None:
    """Print medians and ratios."""
    rates = {key: kit.median([figures["rate"] for figures in runs]) for key, runs in found.items()}
    rows = []
    for (name, connections), runs in sorted(found.items(), key=lambda item: (item[0][1], names.index(item[0][0]))):
        p50, p99 = (kit.median([figures[share] for figures in runs]) for share in ("p50", "p99"))
        ratios = [
            rates[name, connections] / rates[peer, connections] if (peer, connections) in rates else "-"
            for peer in ("naive", "mosec")
        ]
        other = int(sum(figures["other"] for figures in runs))
        rows.append([name, connections, f"{rates[name, connections]:,.0f}", p50, p99, other, *ratios])
    columns = ["", "connections", "requests/s", "p50 ms", "p99 ms", "errors", "x naive", "x mosec"]
    versions = [kit.version(sys.executable, "headrace")]
    versions += [
        kit.version(kit.peer_python(name, *PACKAGES[name]), {"naive": "fastapi"}.get(name, name))
        for name in names
        if name in PACKAGES
    ]
    kit.table("The short road: /predict, tiny model, JSON", columns, rows, [", ".join(versions) + "."])


if __name__ == "__main__":
    main()
