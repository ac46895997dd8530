"""The HTTP client of the webhook sink: connects only to addresses that the policy has seen, follows nothing."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import cast

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.client_proto import ResponseHandler
from yarl import URL

from headrace.sinks.webhook_address import Address, Policy, address_of

__all__ = ["ANSWER_BYTES_MAX", "AddressRefused", "Client", "LookUp", "Reply", "Trouble"]

#: Read of an answer's body, so that its connection can be used again; a longer one costs the connection.
ANSWER_BYTES_MAX = 64 * 1024

# The status decides; the body is read only to keep the connection, so nobody waits for it long.
_DRAIN_S = 1.0
# Below what servers commonly allow (uvicorn and Node.js close after 5 s): a POST into a connection that the other side
# is just closing fails, and must not be repeated behind the back of whoever counts attempts.
_IDLE_S = 4.0
# getaddrinfo waits as long as the name servers let it. In threads of their own, which nobody joins, names that do not
# resolve hold up neither each other, nor whatever else uses the loop's default threads, nor the end of the process.
_LOOK_UPS_MAX = 32
# Of a line or a header of an answer: a receiver may set large cookies, and its status counts all the same.
_FIELD_BYTES_MAX = 64 * 1024
_BODILESS = frozenset({204, 304})
_HEAD_END = b"\r\n\r\n"
# A final answer may follow some 1xx in one piece of data; more than a few, and it is a body.
_HEADS_MAX = 8

LookUp = Callable[[str, int], Awaitable[list[Address]]]


class AddressRefused(Exception):
    """A name leads, at least in part, to an address that is not connected to. Not an OSError: those are retried."""


class Trouble(Exception):
    """There was no answer; `timed_out` says whether because it took too long."""

    def __init__(self, text: str, *, timed_out: bool = False) -> None:
        super().__init__(text)
        self.timed_out = timed_out


@dataclass(frozen=True, slots=True)
class Reply:
    """What the receiver answered."""

    status: int
    #: The header's text, if it came.
    retry_after: str | None


class Client:
    """Posts bodies; connections are kept and used again."""

    def __init__(
        self, policy: Policy, *, timeout_s: float, connect_timeout_s: float, look_up: LookUp | None = None
    ) -> None:
        """`look_up` finds every address of a host and port, by default as the system does; tests hand in their own."""
        self._look_ups = asyncio.Semaphore(_LOOK_UPS_MAX)
        connector = aiohttp.TCPConnector(
            resolver=_Resolver(policy, look_up or self._look_up),
            # No cache: whoever owns a name may change it between two attempts, and each one is checked.
            use_dns_cache=False,
            limit=0,
            keepalive_timeout=_IDLE_S,
        )
        # Not a public hook; the tests of answers with odd bodies fail if it is not taken any more.
        factory = functools.partial(_HeadFirst, loop=asyncio.get_running_loop())
        connector._factory = cast("functools.partial[ResponseHandler]", factory)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=connect_timeout_s),
            trust_env=False,
            auto_decompress=False,
            max_line_size=_FIELD_BYTES_MAX,
            max_field_size=_FIELD_BYTES_MAX,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept-Encoding", "Accept", "User-Agent"),
        )
        self._timeout_s = timeout_s

    async def post(self, url: str, headers: Mapping[str, str], body: bytes) -> Reply:
        """Post once. Raises AddressRefused, or Trouble where no answer came.

        The host of `url` is a name, or an address that the caller has checked. When the call is cancelled, or takes
        too long, its connection is closed: a late answer must not be taken for the next one's.
        """
        reply: Reply | None = None
        try:
            async with self._session.post(
                URL(url, encoded=True), data=body, headers=headers, allow_redirects=False
            ) as answer:
                reply = Reply(answer.status, answer.headers.get("Retry-After"))
                if not answer.content.at_eof():
                    await _drain(answer)
        except TimeoutError as error:
            if reply is None:
                raise Trouble(f"no answer within {self._timeout_s:g} s", timed_out=True) from error
        except aiohttp.ClientError as error:
            # Whatever goes wrong once the status is there takes nothing back.
            if reply is None:
                raise Trouble(_words(error)) from error
        except ValueError as error:
            # aiohttp refuses what it cannot send; the form was checked, so this is a header or a URL we never met.
            raise Trouble(f"cannot be sent: {type(error).__name__}") from error
        if reply is None:
            raise Trouble("no answer")
        return reply

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()

    async def _look_up(self, host: str, port: int) -> list[Address]:
        loop = asyncio.get_running_loop()
        found: asyncio.Future[list[Address]] = loop.create_future()

        def finish(addresses: list[Address], error: OSError | None) -> None:
            self._look_ups.release()
            if error is not None and not found.done():
                found.set_exception(error)
            elif not found.done():
                found.set_result(addresses)

        def run() -> None:
            addresses: list[Address] = []
            error = None
            try:
                addresses = _addresses(host, port)
            except (OSError, UnicodeError) as problem:
                error = problem if isinstance(problem, OSError) else OSError(str(problem))
            # The loop may have ended long before a name server that does not answer is given up.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(finish, addresses, error)

        # Released by the thread's end and not by ours: when we stop waiting, it still waits.
        await self._look_ups.acquire()
        threading.Thread(target=run, name="headrace-name", daemon=True).start()
        return await found


class _HeadFirst(ResponseHandler):
    """Has the head of an answer read by itself.

    Where head and body come in one piece and the body is wrong (a 204 that has one, a chunk without a size), aiohttp
    drops both; but the status was given, and it decides.
    """

    _end = b""

    def data_received(self, data: bytes) -> None:
        if not data:
            # Not news from the socket: it goes on with what it has.
            super().data_received(data)
            return
        # A parser takes what it gets in any pieces; the end of a head may itself come in two.
        seam = (self._end + data[:3]).find(_HEAD_END)
        start = 0 if seam < 0 else seam + len(_HEAD_END) - len(self._end)
        self._end = (self._end + data)[-3:]
        rest = [data[:start], data[start:]] if start else [data]
        *heads, last = rest[-1].split(_HEAD_END, _HEADS_MAX)
        for piece in (*rest[:-1], *(head + _HEAD_END for head in heads), last):
            if piece:
                super().data_received(piece)
                self._check_owed()

    def _check_owed(self) -> None:
        """Give up the connection behind a 204 or 304 that says it has a body: that would be read as the next answer."""
        if self._buffer:
            (message, _), _ = self._buffer[-1]
            length = message.headers.get("Content-Length", "0")
            if message.code in _BODILESS and (length != "0" or "Transfer-Encoding" in message.headers):
                self.force_close()


class _Resolver(AbstractResolver):
    """Hands the connector only addresses that the policy has seen; it connects to these and looks nothing up."""

    def __init__(self, policy: Policy, look_up: LookUp) -> None:
        self._policy = policy
        self._look_up = look_up

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        addresses = await self._look_up(host, port)
        for address in addresses:
            # One bad address refuses the name: which one a connection takes is not ours to choose.
            reason = self._policy.refuses(host.removesuffix("."), address)
            if reason:
                raise AddressRefused(reason)
        if not addresses:
            raise OSError(socket.EAI_NONAME, "the name has no address")
        return [
            ResolveResult(
                hostname=host,
                host=str(address),
                port=port,
                family=socket.AF_INET if address.version == 4 else socket.AF_INET6,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST,
            )
            for address in addresses
        ]

    async def close(self) -> None:
        pass


def _addresses(host: str, port: int) -> list[Address]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(address_of(str(entry[4][0])) for entry in found))


async def _drain(answer: aiohttp.ClientResponse) -> None:
    """Read the rest of a short body; close the connection of any other."""
    size = 0
    try:
        async with asyncio.timeout(_DRAIN_S):
            async for piece in answer.content.iter_any():
                size += len(piece)
                if size > ANSWER_BYTES_MAX:
                    break
            else:
                return
    except (aiohttp.ClientError, TimeoutError, OSError):
        pass
    answer.close()


def _words(error: aiohttp.ClientError) -> str:
    """Return what happened in words that name no address: the result's owner reads them, whoever that is."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "its name cannot be looked up"
    if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientSSLError):
        return "its certificate is not valid, or TLS failed"
    if isinstance(error, aiohttp.ClientConnectorError):
        # The loop's own text has the address in it; the number has not.
        return f"no connection: {os.strerror(error.errno).lower()}" if error.errno else "no connection"
    if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError):
        return "the connection was closed before an answer"
    return f"no HTTP answer: {type(error).__name__}"
