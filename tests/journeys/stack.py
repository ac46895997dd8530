"""A real `headrace up` in its own processes, clients that keep a history of it, and a real webhook receiver."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from aiohttp import web
from standardwebhooks.webhooks import Webhook

from headrace.testing.history import Ending, History

SECRET = "whsec_" + "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def until(happened: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
    """Wait for the thing itself, with a bound."""
    end = time.monotonic() + timeout_s
    while True:
        found = happened()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return found
        if time.monotonic() > end:
            raise AssertionError(f"{timeout_s} s passed without: {what}")
        await asyncio.sleep(0.02)


class Stack:
    """`headrace up MODELS` with its data in a folder; every test gets its own."""

    def __init__(
        self, folder: Path, models: list[str], *, command: str = "up", flags: tuple[str, ...] = (), **environ: str
    ) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.models = models
        self.command = command
        self.flags = flags
        self.environ = {"HEADRACE_WEBHOOK_SECRET": SECRET, "HEADRACE_WEBHOOK_ALLOW_PRIVATE": "true", **environ}
        self.history = History()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def database(self) -> Path:
        return self.folder / "data" / "headrace.db"

    def log(self) -> str:
        return (self.folder / "up.log").read_text(errors="replace")

    def start(self) -> None:
        command = [sys.executable, "-m", "headrace", self.command, *self.models]
        command += ["--data", str(self.folder / "data")] if self.command == "up" else []
        command += ["--port", str(self.port), *self.flags]
        with (self.folder / "up.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **self.environ}, start_new_session=True
            )

    async def ready(self, timeout_s: float = 60.0) -> None:
        async def asked() -> bool:
            assert self.process is not None and self.process.poll() is None, self.log()[-3000:]
            with contextlib.suppress(aiohttp.ClientError, OSError):
                async with self.http() as http, http.get("/v2/health/ready") as answer:
                    return answer.status == 200
            return False

        await until(asked, "ready", timeout_s)

    def http(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(self.url, timeout=aiohttp.ClientTimeout(total=60))

    def pids(self, service: str) -> list[int]:
        """Return the pids of a service's processes, as a person with `ps` would find them."""
        assert self.process is not None
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                    if service in child.cmdline():
                        found.append(child.pid)
        return found

    def kill(self, service: str, how: signal.Signals = signal.SIGKILL, rng: random.Random | None = None) -> int | None:
        pids = self.pids(service)
        if not pids:
            return None
        pid = (rng or random.Random(0)).choice(pids)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, how)
        return pid

    async def stop(self, timeout_s: float = 30.0) -> int:
        """SIGTERM, then wait for the exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        await until(lambda: self.process is not None and self.process.poll() is not None, "exit", timeout_s)
        return self.process.returncode

    def destroy(self) -> None:
        """Leave nothing behind, whatever the test did."""
        if self.process is None:
            return
        family = [self.process.pid]
        with contextlib.suppress(psutil.NoSuchProcess):
            family += [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)

    async def submit(
        self,
        http: aiohttp.ClientSession,
        model: str,
        body: dict[str, Any],
        *,
        key: str | None = None,
        destination: str | None = None,
        must_fail: bool = False,
    ) -> str | None:
        """Send one message and note its outcome; return its id, or None where it was not accepted."""
        headers = {"Prefer": "respond-async"}
        if key:
            headers["Idempotency-Key"] = key
        if destination:
            headers["Webhook-URL"] = destination
        try:
            async with http.post(f"/v2/models/{model}/infer", json=body, headers=headers) as answer:
                content = await answer.json()
                location = answer.headers.get("Location")
                if location is None:
                    self.history.refused += 1
                    return None
        except (aiohttp.ClientError, OSError, TimeoutError):
            self.history.unknown += 1
            return None
        assert location == f"/requests/{content['id']}"
        request = json.dumps([model, body], sort_keys=True)
        self.history.accept(content["id"], key=key, request=request, destinations=[destination] if destination else [])
        if must_fail:
            self.history.meant_to_fail.add(content["id"])
        return str(content["id"])

    async def result(self, http: aiohttp.ClientSession, id: str, timeout_s: float = 60.0) -> dict[str, Any]:
        """Wait for one result by long polling."""

        async def asked() -> dict[str, Any] | None:
            async with http.get(f"/requests/{id}?wait=5") as answer:
                found = await answer.json()
                assert answer.status in (200, 202), found
                return found if answer.status == 200 else None

        return dict(await until(asked, f"a result of {id}", timeout_s))

    async def pull(self, http: aiohttp.ClientSession) -> tuple[dict[str, list[bytes]], set[str]]:
        """Read all results through the pull route: id → the rows found, and the ids that failed."""
        results: dict[str, list[bytes]] = {}
        failed: set[str] = set()
        cursor = ""
        while True:
            async with http.get("/results", params={"after": cursor, "limit": "500"}) as answer:
                page = await answer.json()
                assert answer.status == 200, page
            for found in page["results"]:
                frozen = {name: value for name, value in found.items() if name != "deliveries"}
                results.setdefault(found["id"], []).append(json.dumps(frozen, sort_keys=True).encode())
                if found["status"] == "failed":
                    failed.add(found["id"])
            if not page["results"]:
                return results, failed
            cursor = page["next"]

    async def drained(self, http: aiohttp.ClientSession, timeout_s: float = 120.0) -> Ending:
        """Wait until every accepted id has a result, then look at what is there."""

        async def asked() -> bool:
            results, _ = await self.pull(http)
            return self.history.accepted <= set(results)

        with contextlib.suppress(AssertionError):  # the checker says better what is missing
            await until(asked, "every accepted message has a result", timeout_s)
        results, failed = await self.pull(http)
        return Ending(results=results, failed=failed)


class Receiver:
    """A webhook receiver that checks signatures as a customer would and can misbehave on order."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/hook"
        #: Called with the request's number; returns the status to answer.
        self.status: Callable[[int], int] = lambda number: 200
        self.requests = 0
        self.ids: set[str] = set()
        self._webhook = Webhook(SECRET)

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.requests += 1
        try:
            self._webhook.verify(body, dict(request.headers))
            valid = True
        except Exception:
            valid = False
        id = str(json.loads(body)["data"]["id"])
        valid = valid and request.headers["webhook-id"].startswith(id)
        self.history.receive(id, self.url, body, valid=valid)
        status = self.status(self.requests)
        if 200 <= status < 300:
            self.ids.add(id)
        return web.Response(status=status)

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[Receiver]:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/hook", self.handle)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        try:
            yield self
        finally:
            await runner.cleanup()


def tensor(name: str, datatype: str, data: list[Any], shape: list[int] | None = None) -> dict[str, Any]:
    """Return an OIP request with one input; the shape is read off nested data unless given."""
    if shape is None:
        shape, inner = [], data
        while isinstance(inner, list):
            shape.append(len(inner))
            inner = inner[0] if inner else None
    return {"inputs": [{"name": name, "shape": shape, "datatype": datatype, "data": data}]}
