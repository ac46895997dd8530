"""A real listener on a real socket, spoken to in raw bytes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import gzip
import json
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.services.door import Call
from headrace.tensor import Tensor
from headrace.web.server import CannotListen, Listener, probe, run, serve
from web.kit import FakeDoor, FakeRequests, Reply, World, exchange_bytes, listening, parse_reply, world

GOOD = b'{"data": [[1, 2, 3]]}'


def on_uvloop(function: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test on the loop that the service runs on."""

    @functools.wraps(function)
    def sync(*args: Any, **more: Any) -> None:
        run(function(*args, **more))

    return sync


def post(body: bytes = GOOD, path: str = "/predict", *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Connection:
    """One client's connection, answer by answer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, port: int) -> Connection:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def answer(self) -> Reply:
        head = await self.reader.readuntil(b"\r\n\r\n")
        reply = parse_reply(head)
        reply.body = await self.reader.readexactly(int(reply.headers.get("content-length", "0")))
        return reply

    async def ask(self, data: bytes) -> Reply:
        self.writer.write(data)
        return await self.answer()

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


def slow_door() -> tuple[FakeDoor, asyncio.Event, asyncio.Event]:
    """A model that waits until the test lets it go on."""
    started, release = asyncio.Event(), asyncio.Event()

    async def run(inputs: dict[str, Tensor], call: Call) -> dict[str, Tensor]:
        started.set()
        await release.wait()
        return {"y": inputs["x"]}

    return FakeDoor(run=run), started, release


async def until(condition: Any) -> None:
    """Wait for the thing itself; the test's own timeout is the bound."""
    while not condition():
        await asyncio.sleep(0.01)


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


# -- plain HTTP -------------------------------------------------------------------------------------------


@on_uvloop
async def test_one_connection_serves_many_requests() -> None:
    async with listening(world()) as listener:
        connection = await Connection.open(listener.port)
        for number in range(5):
            reply = await connection.ask(post(GOOD, "/predict", f"X-Request-Id: r{number}"))
            assert (reply.status, reply.headers["x-request-id"]) == (200, f"r{number}")
        await connection.close()


@on_uvloop
async def test_pipelined_requests_are_answered_in_order() -> None:
    async with listening(world()) as listener:
        connection = await Connection.open(listener.port)
        connection.writer.write(b"".join(post(GOOD, "/predict", f"X-Request-Id: r{n}") for n in range(20)))
        ids = [(await connection.answer()).headers["x-request-id"] for _ in range(20)]
        assert ids == [f"r{n}" for n in range(20)]
        await connection.close()


@on_uvloop
async def test_a10_head_and_options_leave_the_connection_in_step() -> None:
    async with listening(world()) as listener:
        connection = await Connection.open(listener.port)
        connection.writer.write(b"HEAD /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        head = parse_reply(await connection.reader.readuntil(b"\r\n\r\n"))
        assert (head.status, head.headers["content-length"]) == (200, "13")
        reply = await connection.ask(b"OPTIONS /predict HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (reply.status, reply.headers["allow"]) == (204, "OPTIONS, POST")
        assert "content-length" not in reply.headers
        assert "transfer-encoding" not in reply.headers
        assert (await connection.ask(post())).status == 200
        await connection.close()


@on_uvloop
@pytest.mark.parametrize(("version", "header"), [("1.0", "X: y"), ("1.1", "Connection: close")])
async def test_who_wants_the_connection_closed_is_told_once(version: str, header: str) -> None:
    async with listening(world()) as listener:
        raw = f"GET /v2/health/live HTTP/{version}\r\nHost: x\r\n{header}\r\n\r\n".encode()
        reply = parse_reply(await exchange_bytes(listener.port, raw))
        assert (reply.status, reply.body) == (200, b'{"live":true}')
        assert [value for name, value in reply.every if name == "connection"] == ["close"]
        assert len([name for name, _ in reply.every if name == "date"]) == 1


@on_uvloop
async def test_a_chunked_body_is_read() -> None:
    raw = b"POST /predict HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (GOOD[:4], GOOD[4:]))
    async with listening(world()) as listener:
        assert parse_reply(await exchange_bytes(listener.port, raw + chunks + b"0\r\n\r\n")).status == 200


@on_uvloop
async def test_a9_a_packed_body_is_read_and_a_bomb_is_not() -> None:
    async with listening(world(body_bytes_max=1_000_000)) as listener:
        packed = post(gzip.compress(GOOD), "/predict", "Content-Encoding: gzip", "Connection: close")
        assert parse_reply(await exchange_bytes(listener.port, packed)).status == 200
        bomb = post(gzip.compress(b"\0" * 100_000_000), "/predict", "Content-Encoding: gzip", "Connection: close")
        assert parse_reply(await exchange_bytes(listener.port, bomb)).status == 413


@pytest.mark.parametrize(
    "raw",
    [
        b"junk\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"FROB /predict HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nbad header\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
        b"POST /predict HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"POST /predict HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
@on_uvloop
async def test_what_is_not_http_is_an_error_like_every_other(raw: bytes, caplog: pytest.LogCaptureFixture) -> None:
    here = world()
    async with listening(here) as listener:
        reply = parse_reply(await exchange_bytes(listener.port, raw))
        assert (reply.status, reply.json()["code"]) == (400, "invalid_request")
        assert reply.headers["x-request-id"] == reply.json()["request_id"]
        assert (await here.ask("GET", "/v2/health/live")).status == 200
    line = here.lines.all()[0]
    assert (line["status"], line["route"], line["request_id"]) == (400, "other", reply.json()["request_id"])
    assert not caplog.records


@pytest.mark.parametrize("target", ["//predict", "*", "http://other.example/nowhere"])
@on_uvloop
async def test_a10_odd_targets_are_answered_and_never_redirected(target: str) -> None:
    async with listening(world()) as listener:
        raw = f"OPTIONS {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
        assert parse_reply(await exchange_bytes(listener.port, raw)).status in (204, 404)


@on_uvloop
async def test_an_upgrade_that_we_do_not_offer_is_served_as_plain_http() -> None:
    async with listening(world()) as listener:
        raw = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nConnection: close, Upgrade\r\nUpgrade: h2c\r\n\r\n"
        assert parse_reply(await exchange_bytes(listener.port, raw)).status == 200


@on_uvloop
async def test_a_refusal_reaches_a_client_that_is_still_sending() -> None:
    async with listening(world(body_bytes_max=1_000_000)) as listener:
        connection = await Connection.open(listener.port)
        connection.writer.write(post(b"x" * 2_000_000, "/predict")[:200])
        reply = await connection.answer()
        assert (reply.status, reply.headers["connection"]) == (413, "close")
        # The rest is sent after the answer: it must meet an open ear, not a reset.
        connection.writer.write(b"x" * 1_000_000)
        await connection.writer.drain()
        await connection.close()


@on_uvloop
async def test_who_asks_before_sending_is_refused_without_an_invitation() -> None:
    async with listening(world(body_bytes_max=1024)) as listener:
        raw = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 2000\r\nExpect: 100-continue\r\n\r\n"
        assert (await exchange_bytes(listener.port, raw)).startswith(b"HTTP/1.1 413 ")
        connection = await Connection.open(listener.port)
        connection.writer.write(post(GOOD, "/predict", "Expect: 100-continue")[: -len(GOOD)])
        assert await connection.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert (await connection.ask(GOOD)).status == 200
        await connection.close()


@on_uvloop
async def test_a_small_unread_body_does_not_cost_the_connection() -> None:
    async with listening(world()) as listener:
        connection = await Connection.open(listener.port)
        assert (await connection.ask(post(b"x" * 1000, "/nowhere"))).status == 404
        assert (await connection.ask(post())).status == 200
        await connection.close()


@on_uvloop
@pytest.mark.parametrize("body", [GOOD, b'{"data": [[1, 2]]}', b"{"])
async def test_a_request_leaves_nothing_for_the_collector(body: bytes) -> None:
    """Circles would be collected in pauses, and pauses are what a p99 is made of."""
    async with listening(world()) as listener:
        connection = await Connection.open(listener.port)
        await connection.ask(post(body))
        gc.collect()
        gc.disable()
        try:
            for _ in range(100):
                await connection.ask(post(body))
            assert gc.collect() < 100
        finally:
            gc.enable()
        await connection.close()


@on_uvloop
async def test_events_are_chunks_that_end() -> None:
    requests = FakeRequests()
    requests.put("a")
    async with listening(world(FakeDoor(requests=requests))) as listener:
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(b"GET /requests/a/events HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        head = await reader.readuntil(b"event: pending")
        assert b"transfer-encoding: chunked" in head
        requests.put("a", "succeeded")
        rest = await reader.read()
        assert b"event: succeeded" in rest
        assert rest.endswith(b"0\r\n\r\n")
        writer.close()
        await writer.wait_closed()


# -- clients that go, dawdle or flood ---------------------------------------------------------------------


@on_uvloop
async def test_a11_clients_that_hang_up_leave_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    here = world()
    async with listening(here) as listener:
        await exchange_bytes(listener.port, post(GOOD, "/predict", "Connection: close"))
        before = descriptors()
        for number in range(200):
            _, writer = await asyncio.open_connection("127.0.0.1", listener.port)
            how = b"Content-Length: 1000000\r\n\r\n" if number % 2 else b"Transfer-Encoding: chunked\r\n\r\n2710\r\n"
            writer.write(b"POST /predict HTTP/1.1\r\nHost: x\r\n" + how + b"x" * 10_000)
            await writer.drain()
            writer.close()
            await writer.wait_closed()
        await until(lambda: here.count().get(("/predict", "POST", "499")) == 200)
        await until(lambda: descriptors() <= before)
        assert len(here.door.calls) == 1
        assert not here.app.inflight
        assert not here.lines.all("request_failed")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@on_uvloop
async def test_a11_a_client_that_hangs_up_while_the_model_runs_ends_the_wait() -> None:
    door, started, _ = slow_door()
    here = world(door)
    async with listening(here) as listener:
        connection = await Connection.open(listener.port)
        connection.writer.write(post())
        await started.wait()
        await connection.close()
        await until(lambda: door.cancelled == 1)
        await until(lambda: here.count().get(("/predict", "POST", "499")) == 1)


@on_uvloop
async def test_a11_a_slow_sender_is_cut_with_408_and_holds_up_nobody() -> None:
    async with listening(world(body_timeout_s=0.5)) as listener:
        connection = await Connection.open(listener.port)
        connection.writer.write(post(b"x" * 1000)[:-999])
        assert (await exchange_bytes(listener.port, post(GOOD, "/predict", "Connection: close")))[9:12] == b"200"
        reply = await connection.answer()
        assert (reply.status, reply.headers["connection"]) == (408, "close")
        assert await connection.reader.read() == b""
        await connection.close()


@pytest.mark.parametrize(
    ("sent", "status"), [(b"", None), (b"POST /pre", 408), (b"POST /predict HTTP/1.1\r\nHost: x\r\n", 408)]
)
@on_uvloop
async def test_a_head_that_never_ends_is_cut(sent: bytes, status: int | None) -> None:
    async with listening(world(head_timeout_s=0.5)) as listener:
        raw = await exchange_bytes(listener.port, sent)
        assert (parse_reply(raw).status if raw else None) == status


@on_uvloop
async def test_a_head_that_never_ends_is_cut_on_a_used_connection_too() -> None:
    async with listening(world(head_timeout_s=0.5)) as listener:
        connection = await Connection.open(listener.port)
        assert (await connection.ask(post())).status == 200
        connection.writer.write(b"GET /health HT")
        assert (await connection.answer()).status == 408
        await connection.close()


@on_uvloop
async def test_an_idle_connection_is_closed() -> None:
    async with listening(world(idle_timeout_s=1)) as listener:
        connection = await Connection.open(listener.port)
        assert (await connection.ask(post())).status == 200
        assert await connection.reader.read() == b""
        await connection.close()


@on_uvloop
async def test_a_head_without_end_is_refused_by_its_size() -> None:
    async with listening(world(head_bytes_max=10_000)) as listener:
        connection = await Connection.open(listener.port)
        connection.writer.write(b"GET /health HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                connection.writer.write(b"X-Long: " + b"y" * 1000 + b"\r\n")
                await connection.writer.drain()
        reply = await connection.answer()
        assert (reply.status, reply.json()["code"]) == (413, "too_large")
        assert reply.json()["details"]["limit"] == 10_000
        await connection.close()


@on_uvloop
async def test_a_client_that_does_not_read_does_not_hold_its_answer_for_ever() -> None:
    many = b'{"data": ' + json.dumps([[1.5, 2.5, 3.5]] * 400_000).encode() + b"}"
    here = world(head_timeout_s=0.5)
    async with listening(here) as listener:
        raw = socket.create_connection(("127.0.0.1", listener.port))
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setblocking(False)
        await asyncio.get_running_loop().sock_sendall(raw, post(many))
        await until(lambda: here.count().get(("/predict", "POST", "200")) == 1)
        await until(lambda: not listener._connections.open)
        raw.close()


# -- starting and stopping --------------------------------------------------------------------------------


@on_uvloop
async def test_a16_a_taken_port_is_one_line_with_address_and_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(CannotListen) as caught:
            await Listener(world().app, "127.0.0.1", port).start()
    assert str(caught.value) == f"cannot listen on 127.0.0.1:{port}: address already in use"


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid", "::ffff:zz"])
@on_uvloop
async def test_an_address_that_is_not_ours_is_one_line(host: str) -> None:
    with pytest.raises(CannotListen, match=f"cannot listen on {host}:0: "):
        await Listener(world().app, host, 0).start()


@on_uvloop
async def test_a16_two_that_start_at_once_cannot_both_have_the_port() -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        # Bound and not listening yet: binding beside it succeeds, and only listening tells.
        port = other.getsockname()[1]
        first = Listener(world().app, "127.0.0.1", port)
        await first.start()
        with pytest.raises(CannotListen, match=f"127.0.0.1:{port}: address already in use"):
            await Listener(world().app, "127.0.0.1", port).start()
        with pytest.raises(CannotListen, match=f"127.0.0.1:{port}"):
            probe("127.0.0.1", port)
        await first.stop()


def test_a_port_can_be_tried_beforehand() -> None:
    port = probe("127.0.0.1", 0)
    assert port > 0
    assert probe("127.0.0.1", port) == port


@on_uvloop
async def test_a_free_port_is_reported() -> None:
    told: list[tuple[str, int]] = []
    stop = asyncio.Event()
    serving = asyncio.create_task(
        serve(world().app, "localhost", 0, stop=stop, on_listening=lambda host, port: told.append((host, port)))
    )
    await until(lambda: told)
    host, port = told[0]
    assert host == "localhost"
    reply = parse_reply(await exchange_bytes(port, post(GOOD, "/predict", "Connection: close")))
    assert reply.status == 200
    stop.set()
    await serving
    with pytest.raises(ConnectionError):
        await asyncio.open_connection("127.0.0.1", port)


async def start_slow_request(here: World, listener: Listener, started: asyncio.Event) -> Connection:
    busy = await Connection.open(listener.port)
    busy.writer.write(post())
    await started.wait()
    return busy


@on_uvloop
async def test_a17_a_stop_finishes_what_is_in_progress_and_refuses_what_comes_later() -> None:
    door, started, release = slow_door()
    here = world(door)
    listener = Listener(here.app, "127.0.0.1", 0)
    await listener.start()
    probe, late = await Connection.open(listener.port), await Connection.open(listener.port)
    assert (await probe.ask(b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\n\r\n")).status == 200
    busy = await start_slow_request(here, listener, started)
    stopping = asyncio.create_task(listener.stop())
    twice = asyncio.create_task(listener.stop())
    await until(lambda: here.app.site.refusing)
    reply = await probe.ask(b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (reply.status, reply.headers["connection"]) == (503, "close")
    reply = await late.ask(post())
    assert (reply.status, reply.json()["code"], reply.headers["connection"]) == (503, "not_ready", "close")
    with pytest.raises(ConnectionError):
        await asyncio.open_connection("127.0.0.1", listener.port)
    assert not stopping.done()
    release.set()
    reply = await busy.answer()
    assert (reply.status, reply.headers["connection"]) == (200, "close")
    await asyncio.gather(stopping, twice)
    for connection in (probe, late, busy):
        await connection.close()


@on_uvloop
async def test_a17_a_request_that_outlasts_the_grace_is_told_so() -> None:
    door, started, _ = slow_door()
    here = world(door, grace_s=0.1)
    listener = Listener(here.app, "127.0.0.1", 0)
    await listener.start()
    busy = await start_slow_request(here, listener, started)
    await listener.stop()
    reply = await busy.answer()
    assert (reply.status, reply.json()["code"], reply.headers["connection"]) == (503, "not_ready", "close")
    assert door.cancelled == 1
    await busy.close()


@on_uvloop
async def test_a17_while_draining_ready_is_503_and_requests_are_served() -> None:
    here = world(drain_s=0.5)
    listener = Listener(here.app, "127.0.0.1", 0)
    await listener.start()
    stopping = asyncio.create_task(listener.stop())
    await until(lambda: here.app.site.draining)
    assert (await here.ask("GET", "/v2/health/ready")).status == 503
    reply = parse_reply(await exchange_bytes(listener.port, post()))
    assert (reply.status, reply.headers["connection"]) == (200, "close")
    await stopping


@on_uvloop
async def test_a17_nobody_gets_a_500_or_half_an_answer_while_it_stops() -> None:
    """Fifty clients send as fast as they can over kept connections while the listener stops."""

    async def quick(inputs: dict[str, Tensor], call: Call) -> dict[str, Tensor]:
        await asyncio.sleep(0.005)
        return {"y": inputs["x"]}

    here = world(FakeDoor(run=quick))
    listener = Listener(here.app, "127.0.0.1", 0)
    await listener.start()
    statuses: list[int] = []

    async def client() -> None:
        connection = await Connection.open(listener.port)
        try:
            while True:
                reply = await connection.ask(post())
                statuses.append(reply.status)
                if reply.headers.get("connection") == "close":
                    return
        except asyncio.IncompleteReadError as error:
            # Closed between two requests is fair; half an answer is not.
            assert error.partial == b""
        except ConnectionError:
            pass
        finally:
            await connection.close()

    clients = [asyncio.create_task(client()) for _ in range(50)]
    await until(lambda: len(statuses) > 200)
    await listener.stop()
    await asyncio.gather(*clients)
    assert set(statuses) <= {200, 503}
    assert statuses.count(200) == len(here.door.calls)


def test_signals_are_left_to_the_service() -> None:
    import signal

    seen: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()

        def on_signal() -> None:
            seen.append(1)
            stop.set()

        loop.add_signal_handler(signal.SIGTERM, on_signal)
        serving = asyncio.create_task(
            serve(world().app, "127.0.0.1", 0, stop=stop, on_listening=lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        )
        await stop.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await serving
        loop.remove_signal_handler(signal.SIGTERM)

    run(main())
    assert seen == [1, 1]
