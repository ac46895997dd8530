"""Sending webhooks: signatures, and receivers that behave badly (A36, A37)."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from ipaddress import ip_address
from typing import Any

import pytest
from standardwebhooks import Webhook, WebhookVerificationError

from headrace.errors import InvalidRequest
from headrace.message import Dispatch
from headrace.settings import SettingsError, load
from headrace.sinks import Sinks, open_sinks
from headrace.sinks.base import Outcome
from headrace.sinks.webhook import WebhookSettings, WebhookSink, parse_retry_after, secrets_of
from headrace.sinks.webhook_address import Address
from sinks.receivers import Receiver, Request, answer, receiving

SECRETS = tuple("whsec_" + base64.b64encode(bytes([number]) * 32).decode() for number in (1, 2))
PRIVATE = WebhookSettings(allow_private=True, timeout_s=0.5, connect_timeout_s=0.5)
BODY = '{"type":"result.succeeded","data":{"text":"ü"}}'.encode()


def dispatch(destination: str, **given: Any) -> Dispatch:
    return Dispatch(
        **{
            "id": "m1",
            "destination": destination,
            "webhook_id": "m1",
            "body": BODY,
            "attempt": 1,
            "created_at_ms": 0,
            "token": "t",
            **given,
        }
    )


def now_ms() -> int:
    return time.time_ns() // 1_000_000


@pytest.fixture
async def sink() -> AsyncIterator[WebhookSink]:
    sink = WebhookSink(PRIVATE, SECRETS)
    yield sink
    await sink.close()


async def send(sink: WebhookSink, receiver: Receiver, **given: Any) -> Outcome:
    return await sink.send(dispatch(receiver.url(), **given), now_ms=now_ms())


async def test_a_delivery_is_a_signed_post_of_the_frozen_body(sink: WebhookSink) -> None:
    traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    async with receiving(answer(b"200 OK")) as receiver:
        outcome = await sink.send(dispatch(receiver.url("/hook?key=a%20b"), traceparent=traceparent), now_ms=now_ms())
    assert outcome == Outcome("delivered", 200)
    (request,) = receiver.requests
    assert (request.path, request.body) == ("/hook?key=a%20b", BODY)
    assert request.headers["content-type"] == "application/json"
    assert request.headers["user-agent"].startswith("headrace/")
    assert request.headers["traceparent"] == traceparent
    assert request.headers["webhook-id"] == "m1"
    for secret in SECRETS:
        assert Webhook(secret).verify(request.body, request.headers) == json.loads(BODY)
    with pytest.raises(WebhookVerificationError):
        Webhook(SECRETS[0]).verify(request.body + b" ", request.headers)
    with pytest.raises(WebhookVerificationError):
        Webhook("whsec_" + base64.b64encode(b"z" * 32).decode()).verify(request.body, request.headers)


async def test_the_id_is_the_same_for_every_attempt_and_the_timestamp_is_not(sink: WebhookSink) -> None:
    async with receiving(answer(b"500 No", b"200 OK")) as receiver:
        first = await sink.send(dispatch(receiver.url()), now_ms=1_800_000_000_999)
        second = await sink.send(dispatch(receiver.url(), attempt=2), now_ms=1_800_000_007_000)
    assert (first.kind, first.status, first.error) == ("retry", 500, "HTTP 500")
    assert second.kind == "delivered"
    assert {request.headers["webhook-id"] for request in receiver.requests} == {"m1"}
    assert [request.headers["webhook-timestamp"] for request in receiver.requests] == ["1800000000", "1800000007"]
    assert len({request.headers["webhook-signature"] for request in receiver.requests}) == 2
    assert receiver.connections == 1, "the connection is used again"


@pytest.mark.parametrize(
    ("status", "kind", "throttled"),
    [
        (b"200 OK", "delivered", False),
        (b"204 None", "delivered", False),
        (b"299 Odd", "delivered", False),
        (b"302 Found", "retry", False),
        (b"400 Bad", "retry", False),
        (b"404 None", "retry", False),
        (b"410 Gone", "gone", False),
        (b"429 Slow", "retry", True),
        (b"500 Oops", "retry", False),
        (b"502 Bad", "retry", True),
        (b"503 Busy", "retry", False),
        (b"504 Late", "retry", True),
    ],
)
async def test_a36_only_a_2xx_is_success(sink: WebhookSink, status: bytes, kind: str, throttled: bool) -> None:
    async with receiving(answer(status)) as receiver:
        outcome = await send(sink, receiver)
    assert (outcome.kind, outcome.status, outcome.throttled) == (kind, int(status[:3]), throttled)


async def test_a36_retry_after_is_passed_on(sink: WebhookSink) -> None:
    raw = b"HTTP/1.1 429 Slow\r\nretry-after: 3\r\ncontent-length: 0\r\n\r\n"
    async with receiving(answer(raw)) as receiver:
        assert (await send(sink, receiver)).retry_after_s == 3


async def test_a_redirect_is_a_failure_and_is_not_followed(sink: WebhookSink) -> None:
    async with receiving(answer(b"200 OK")) as other:
        raw = f"HTTP/1.1 307 Go\r\nlocation: {other.url()}\r\ncontent-length: 0\r\n\r\n".encode()
        async with receiving(answer(raw)) as receiver:
            outcome = await send(sink, receiver)
    assert (outcome.kind, outcome.status) == ("retry", 307)
    assert "not followed" in outcome.error
    assert (len(receiver.requests), other.requests) == (1, [])


async def test_a36_a_closed_port_is_a_failure_to_repeat(sink: WebhookSink) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        outcome = await sink.send(dispatch(f"http://127.0.0.1:{taken.getsockname()[1]}/"), now_ms=now_ms())
    assert (outcome.kind, outcome.status) == ("retry", None)
    assert "refused" in outcome.error


async def hang(request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    await reader.read()
    return False


async def test_a36_a_receiver_that_never_answers_costs_the_timeout_and_its_connection(sink: WebhookSink) -> None:
    async with receiving(hang) as receiver:
        outcome = await send(sink, receiver)
        assert (outcome.kind, outcome.throttled) == ("retry", True)
        assert outcome.error == "no answer within 0.5 s"
        await asyncio.wait_for(receiver.closed.wait(), 10)


async def test_a_cancelled_send_closes_its_connection() -> None:
    sink = WebhookSink(WebhookSettings(allow_private=True, timeout_s=300), SECRETS)
    async with receiving(hang) as receiver:
        sending = asyncio.ensure_future(send(sink, receiver))
        while not receiver.requests:
            await asyncio.sleep(0.001)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        await asyncio.wait_for(receiver.closed.wait(), 10)
    await sink.close()


async def drip(request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    for byte in b"HTTP/1.1 200 OK\r\n":
        writer.write(bytes([byte]))
        await asyncio.sleep(0.1)
    return False


async def test_a_head_that_comes_byte_by_byte_does_not_extend_the_timeout(sink: WebhookSink) -> None:
    async with receiving(drip) as receiver:
        assert (await send(sink, receiver)).error == "no answer within 0.5 s"


async def test_a36_a_gigabyte_of_answer_is_not_read(sink: WebhookSink) -> None:
    sent = 0

    async def flood(request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000\r\n\r\n")
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()
            sent += 65536

    async with receiving(flood) as receiver:
        assert (await send(sink, receiver)).kind == "delivered"
        await asyncio.wait_for(receiver.closed.wait(), 10)
        assert sent < 50_000_000


async def test_a_compressed_bomb_is_not_inflated(sink: WebhookSink) -> None:
    import gzip

    bomb = gzip.compress(bytes(10_000_000))
    head = f"HTTP/1.1 500 No\r\ncontent-encoding: gzip\r\ncontent-length: {len(bomb)}\r\n\r\n".encode()
    async with receiving(answer(head + bomb)) as receiver:
        assert (await send(sink, receiver)).status == 500
        assert (await send(sink, receiver)).status == 500
    assert "accept-encoding" not in receiver.requests[0].headers


async def test_a_body_that_never_ends_does_not_hold_up_a_success() -> None:
    async def trickle(request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nx")
        await reader.read()
        return False

    sink = WebhookSink(WebhookSettings(allow_private=True, timeout_s=300), SECRETS)
    async with receiving(trickle) as receiver:
        assert (await asyncio.wait_for(send(sink, receiver), 30)).kind == "delivered"
        await asyncio.wait_for(receiver.closed.wait(), 10)
    await sink.close()


async def test_a_success_that_is_reset_in_its_body_is_a_success(sink: WebhookSink) -> None:
    async def reset(request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"HTTP/1.1 202 OK\r\ncontent-length: 100\r\n\r\nab")
        await writer.drain()
        writer.transport.abort()
        return False

    async with receiving(reset) as receiver:
        assert await send(sink, receiver) == Outcome("delivered", 202)


ODD_BODIES = {
    "204 with a body": (204, b"HTTP/1.1 204 None\r\ncontent-length: 5\r\n\r\nhello"),
    "204 with a page": (204, b"HTTP/1.1 204 None\r\n\r\n<html>\r\n\r\n</html>"),
    "longer than said": (200, b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\nhello"),
    "a large header": (200, b"HTTP/1.1 200 OK\r\nset-cookie: " + b"a" * 20_000 + b"\r\n\r\n"),
    "a second answer": (200, b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\nHTTP/1.1 500 No\r\n\r\n"),
    "a chunk without a size": (200, b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\nhello"),
    "a chunk cut short": (201, b"HTTP/1.1 201 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhel"),
    "after a 1xx": (202, b"HTTP/1.1 103 Early\r\n\r\nHTTP/1.1 202 OK\r\ncontent-length: 0\r\n\r\nhello"),
    "an encoding that is not": (
        200,
        b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 5\r\n\r\nhello",
    ),
}


@pytest.mark.parametrize("pieces", ["one", "two"])
@pytest.mark.parametrize("name", ODD_BODIES)
async def test_a_2xx_is_a_success_whatever_its_body(sink: WebhookSink, name: str, pieces: str) -> None:
    status, raw = ODD_BODIES[name]
    cut = raw.index(b"\r\n\r\n") + 3
    cuts = [raw] if pieces == "one" else [raw[:cut], raw[cut:]]

    async def talk(request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        for piece in cuts:
            writer.write(piece)
        return False

    async with receiving(talk) as receiver:
        assert await send(sink, receiver) == Outcome("delivered", status)


async def test_a_connection_that_owes_the_body_of_a_204_is_not_used_again(sink: WebhookSink) -> None:
    """The body comes late, and would be read as the answer to the next one."""
    next_one = asyncio.Event()

    async def talk(request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        if len(receiver.requests) > 1:
            next_one.set()
        writer.write(b"HTTP/1.1 204 None\r\ncontent-length: 5\r\n\r\n")
        await next_one.wait()
        writer.write(b"hello")
        return True

    async with receiving(talk) as receiver:
        assert await send(sink, receiver) == Outcome("delivered", 204)
        assert await send(sink, receiver) == Outcome("delivered", 204)
    assert receiver.connections == 2


async def test_a_failure_with_an_odd_body_keeps_its_status(sink: WebhookSink) -> None:
    async with receiving(answer(b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\nhello")) as receiver:
        outcome = await send(sink, receiver)
    assert (outcome.kind, outcome.status) == ("retry", 500)


@pytest.mark.parametrize("cut", range(1, 60))
async def test_the_end_of_a_head_may_come_in_any_pieces(cut: int) -> None:
    """Straight into the protocol, where the network cannot join them again."""
    from headrace.sinks.webhook_client import _HeadFirst

    raw = b"HTTP/1.1 204 None\r\nserver: x\r\ncontent-length: 5\r\n\r\nhello"
    protocol = _HeadFirst(asyncio.get_running_loop())
    protocol.set_response_params()
    protocol.data_received(raw[:cut])
    protocol.data_received(raw[cut:])
    message, _ = await protocol.read()
    assert message.code == 204


@pytest.mark.parametrize(
    "raw", [b"", b"SSH-2.0-OpenSSH_9\r\n\r\n", b"HTTP/1.1 9999 x\r\n\r\n", b"\x00" * 100 + b"\r\n\r\n"]
)
async def test_what_is_not_http_is_a_failure_to_repeat(sink: WebhookSink, raw: bytes) -> None:
    async def talk(request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(raw)
        return False

    async with receiving(talk) as receiver:
        outcome = await send(sink, receiver)
    assert (outcome.kind, outcome.status) == ("retry", None)


async def test_proxies_of_the_environment_are_ignored(sink: WebhookSink, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with receiving(answer(b"200 OK")) as receiver:
        assert (await send(sink, receiver)).kind == "delivered"


async def test_cookies_are_not_kept(sink: WebhookSink) -> None:
    raw = b"HTTP/1.1 200 OK\r\nset-cookie: a=b\r\ncontent-length: 0\r\n\r\n"
    async with receiving(answer(raw)) as receiver:
        await send(sink, receiver)
        await send(sink, receiver)
    assert "cookie" not in receiver.requests[1].headers


# -- addresses ------------------------------------------------------------------------------------------


class Names:
    """Name servers of ours: each look-up takes the next answer."""

    def __init__(self, *answers: list[str]) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> list[Address]:
        self.asked.append(host)
        return [ip_address(text) for text in self.answers.pop(0)]


@pytest.mark.parametrize(
    "addresses",
    [["127.0.0.1"], ["8.8.8.8", "10.0.0.1"], ["10.0.0.1", "8.8.8.8"], ["::ffff:127.0.0.1"], ["64:ff9b::7f00:1"]],
)
async def test_a37_a_name_with_one_private_address_is_refused_for_good(addresses: list[str]) -> None:
    async with receiving(answer(b"200 OK")) as receiver:
        names = Names(addresses)
        sink = WebhookSink(WebhookSettings(timeout_s=2), SECRETS, look_up=names)
        outcome = await sink.send(dispatch(receiver.url(host="rebind.example")), now_ms=now_ms())
        await sink.close()
    assert (outcome.kind, receiver.connections) == ("refused", 0)
    assert "127.0.0.1" not in outcome.error


async def test_a37_the_address_that_was_checked_is_the_one_connected_to() -> None:
    """A name that turns private after the check: there is no second look-up that could see it."""
    async with receiving(answer(b"200 OK")) as receiver:
        names = Names(["127.0.0.1"], ["10.255.255.1"])
        settings = WebhookSettings(allow=("127.0.0.0/8",), timeout_s=2)
        sink = WebhookSink(settings, SECRETS, look_up=names)
        url = receiver.url(host="rebind.example")
        first = await sink.send(dispatch(url), now_ms=now_ms())
        again = await sink.send(dispatch(url), now_ms=now_ms())
        assert (first.kind, again.kind, names.asked) == ("delivered", "delivered", ["rebind.example"])
        assert receiver.requests[0].headers["host"] == f"rebind.example:{receiver.port}"
        await sink.close()
        sink = WebhookSink(settings, SECRETS, look_up=names)
        assert (await sink.send(dispatch(url), now_ms=now_ms())).kind == "refused", "a new connection is checked anew"
        await sink.close()


async def test_a37_a_literal_is_checked_again_when_it_is_sent_to() -> None:
    async with receiving(answer(b"200 OK")) as receiver:
        sink = WebhookSink(WebhookSettings(), SECRETS)
        for url in (
            receiver.url(),
            f"http://[::ffff:127.0.0.1]:{receiver.port}/",
            f"http://2130706433:{receiver.port}/",
        ):
            assert (await sink.send(dispatch(url), now_ms=now_ms())).kind == "refused"
        assert receiver.connections == 0
        await sink.close()


async def test_a_name_that_cannot_be_looked_up_is_tried_again(sink: WebhookSink) -> None:
    async def nobody(host: str, port: int) -> list[Address]:
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    sink = WebhookSink(PRIVATE, SECRETS, look_up=nobody)
    outcome = await sink.send(dispatch("http://none.example/"), now_ms=now_ms())
    assert (outcome.kind, outcome.error) == ("retry", "its name cannot be looked up")
    await sink.close()


async def test_a_name_server_that_never_answers_costs_the_timeout() -> None:
    async def never(host: str, port: int) -> list[Address]:
        await asyncio.Event().wait()
        raise AssertionError

    sink = WebhookSink(PRIVATE, SECRETS, look_up=never)
    assert (await sink.send(dispatch("http://slow.example/"), now_ms=now_ms())).throttled
    await sink.close()


async def test_the_systems_own_look_up_finds_this_machine() -> None:
    async with receiving(answer(b"200 OK")) as receiver:
        sink = WebhookSink(PRIVATE, SECRETS)
        outcome = await sink.send(dispatch(receiver.url(host="localhost")), now_ms=now_ms())
        assert outcome.kind == "delivered"
        await sink.close()


# -- settings and the room ------------------------------------------------------------------------------


def test_without_a_secret_the_one_of_the_store_signs() -> None:
    made = secrets_of(WebhookSettings(), b"k" * 32)
    assert made == ("whsec_" + base64.b64encode(b"k" * 32).decode(),)
    assert secrets_of(WebhookSettings(secret=" ".join(SECRETS)), b"k" * 32) == SECRETS


@pytest.mark.parametrize(
    ("secret", "says"),
    [("plain", "does not begin with whsec_"), ("whsec_!", "not base64"), ("whsec_AAAA", "3 bytes")],
)
def test_a_bad_secret_is_a_fault_that_does_not_tell_it(secret: str, says: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load([WebhookSettings], environ={"HEADRACE_WEBHOOK_SECRET": f"{SECRETS[0]} {secret}"})
    assert says in str(caught.value)
    assert secret not in str(caught.value).replace("whsec_ ", "").replace("whsec_:", "") or secret == "plain"
    assert SECRETS[0] not in str(caught.value)


async def test_a_destination_is_handed_to_the_sink_of_its_scheme() -> None:
    sinks = open_sinks(WebhookSettings())
    sinks.check("https://a.example/")
    with pytest.raises(InvalidRequest, match="http://, https://"):
        sinks.check("s3://bucket/key")
    with pytest.raises(InvalidRequest):
        sinks.check("http://127.0.0.1/")
    assert (sinks.name("https://a.example/"), sinks.name("s3://x")) == ("webhook", "")
    assert (await sinks.send(dispatch("s3://x"), now_ms=0)).kind == "refused"
    await sinks.close()
    assert isinstance(sinks, Sinks)


def test_checking_does_not_load_the_http_client() -> None:
    code = (
        "import sys\n"
        "from headrace.sinks import open_sinks\n"
        "from headrace.sinks.webhook import WebhookSettings\n"
        "open_sinks(WebhookSettings()).check('https://a.example/')\n"
        "assert not {'aiohttp', 'standardwebhooks'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("3", 3.0),
        ("1.5", 1.5),
        ("-5", 0.0),
        ("99999999999", 99999999999.0),
        ("Fri, 15 Jan 2027 08:00:30 GMT", 30.0),
        ("Fri, 15 Jan 2027 07:00:00 GMT", 0.0),
        ("Fri, 15 Jan 2027 08:00:30", 30.0),
        (None, None),
        ("", None),
        ("soon", None),
        ("nan", None),
        ("inf", None),
        ("1e999", None),
        ("Fri, 99 Jan 2027 08:00:30 GMT", None),
        ("9" * 65, None),
    ],
)
def test_retry_after_is_seconds_or_a_date_or_nothing(text: str | None, seconds: float | None) -> None:
    assert parse_retry_after(text, 1_800_000_000_000) == seconds
