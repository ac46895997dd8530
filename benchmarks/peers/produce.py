"""produce.py KIND N IN_FLIGHT: connect, print "ready", wait for a line, send N messages, print one JSON line."""

from __future__ import annotations

import json
import os
import sys
import time

kind, count, in_flight = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


def headrace() -> tuple[list[float], int]:
    """POST to /predict with `Prefer: respond-async`, as any HTTP client would."""
    import kit

    body = json.dumps({"data": [kit.row()]}).encode()
    port = int(os.environ["PORT"])
    producer = kit.Producer(port, in_flight, kit.request_bytes(port, "/predict", body, Prefer="respond-async"), 202)
    wait_for_go()
    return producer.run(count)


def celery() -> tuple[list[float], int]:
    """Call `delay`; its Redis client sends one command at a time, so one loop is its fastest producer."""
    from celery_app import infer

    return loop(lambda: infer.delay(ROW))


def dramatiq() -> tuple[list[float], int]:
    """Call `send`; as above."""
    from dramatiq_app import infer

    return loop(lambda: infer.send(ROW))


def loop(send) -> tuple[list[float], int]:  # type: ignore[no-untyped-def]
    send()
    wait_for_go()
    took = []
    for _ in range(count):
        start = time.perf_counter()
        send()
        took.append((time.perf_counter() - start) * 1e3)
    return took, 0


def wait_for_go() -> None:
    print("ready", flush=True)
    sys.stdin.readline()


ROW = json.loads(os.environ.get("ROW", "[]"))
begin = time.perf_counter()
took, other = {"headrace": headrace, "celery": celery, "dramatiq": dramatiq}[kind]()
print(json.dumps({"took_ms": took, "other": other}))
