"""A small HTTP client for a server that runs."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

from headrace.assembly import CannotStart
from headrace.settings import RootSettings, Settings

__all__ = ["Answer", "Client"]

_CONNECT_S = 10.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server said; `body` is the decoded JSON."""

    status: int
    headers: dict[str, str]
    body: Any

    def raise_for_error(self) -> None:
        """Raise CannotStart with the server's own words, unless it said yes."""
        if self.status >= 400:
            body = self.body if isinstance(self.body, dict) else {}
            details = f" {json.dumps(body['details'], ensure_ascii=False)}" if body.get("details") else ""
            raise CannotStart(f"{body.get('code', self.status)}: {body.get('error', 'no reason given')}{details}")


class Client:
    """Calls one server."""

    def __init__(self, url: str | None, settings: Settings) -> None:
        """Without a URL, the server is where the settings would have it listen. Raises CannotStart."""
        root = settings[RootSettings]
        host = f"[{root.host}]" if ":" in root.host else root.host
        self.url = (url or f"http://{host}:{root.port}").rstrip("/")
        if urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).netloc:
            raise CannotStart(f"--url {self.url}: wanted http://HOST:PORT")

    def call(
        self, path: str, body: bytes | None = None, headers: dict[str, str] | None = None, *, timeout_s: float = 60.0
    ) -> Answer:
        """Send a request; `path` parts that come from people are quoted by `part`. Raises CannotStart."""
        request = urllib.request.Request(self.url + path, body, headers or {})
        try:
            with urllib.request.urlopen(request, timeout=timeout_s + _CONNECT_S) as answer:
                return _read(answer.status, dict(answer.headers.items()), answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return _read(error.code, dict(error.headers.items()), error.read())
        except urllib.error.URLError as error:
            raise CannotStart(f"{self.url} does not answer: {_reason(error.reason)}") from error
        except (OSError, ValueError) as error:
            raise CannotStart(f"{self.url} does not answer: {_reason(error)}") from error

    @staticmethod
    def part(text: str) -> str:
        """Return a name as one step of a path."""
        return quote(text, safe="")


def _reason(reason: object) -> str:
    return getattr(reason, "strerror", None) or str(reason)


def _read(status: int, headers: dict[str, str], content: bytes) -> Answer:
    try:
        body = json.loads(content) if content else None
    except ValueError:
        body = {"error": f"status {status}, and not in JSON"}
    return Answer(status, {name.lower(): value for name, value in headers.items()}, body)
