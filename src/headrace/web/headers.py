"""Request headers, read strictly: ids, preferences, keys, destinations. Nothing is echoed unchecked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headrace.errors import InvalidRequest, UnsupportedMediaType

__all__ = [
    "KEY_LENGTH_MAX",
    "Preferences",
    "check_media_type",
    "legal_request_id",
    "read_destinations",
    "read_key",
    "read_preferences",
    "read_seconds",
]

#: Longest Idempotency-Key, after unquoting.
KEY_LENGTH_MAX = 255
DESTINATIONS_MAX = 16
#: A longer Prefer is ignored: unmatched quotes make reading one quadratic.
PREFER_LENGTH_MAX = 1024
DESTINATION_LENGTH_MAX = 2048

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
#: RFC 8941 section 3.3.3: a structured-field string.
_QUOTED = re.compile(rb'"((?:[ !#-\[\]-~]|\\["\\])*)"')
#: A bare key has no quote in it, so that a half-quoted key is a mistake and not another key.
_BARE = re.compile(rb"[!#-~]+")
_VISIBLE = re.compile(r"[!-~]+")
#: RFC 7240 section 2: token [= word] *( ; parameter ).
_PREFERENCE = re.compile(
    r"""\s*(?P<name>[!#$%&'*+.^_`|~0-9A-Za-z-]+)
        (?:\s*=\s*(?P<value>"(?:[^"\\]|\\.)*"|[^\s,;"]*))?
        (?:\s*;[^,"]*(?:"(?:[^"\\]|\\.)*"[^,"]*)*)?\s*""",
    re.VERBOSE,
)
#: A comma ends a URL only where another URL begins, because a URL may hold commas.
_NEXT_URL = re.compile(r"\s*,\s*(?=[A-Za-z][A-Za-z0-9+.-]*:)")
_SECONDS = re.compile(rb"[0-9]{1,9}(?:\.[0-9]{1,9})?")

_JSON_TYPES = {b"application/json", b"*/*"}
_CURL_TYPE = b"application/x-www-form-urlencoded"
_BINARY_TYPES = {b"application/octet-stream", b"application/x-octet-stream", b"binary/octet-stream"}


@dataclass(frozen=True, slots=True)
class Preferences:
    """What `Prefer` asks for, as far as we know it; what we do not know is ignored, as RFC 7240 says."""

    respond_async: bool = False
    wait_s: float | None = None

    @property
    def patience_s(self) -> float | None:
        """Return how long to wait before a 202: None for no wish, 0 for at once."""
        if self.wait_s is not None:
            return self.wait_s
        return 0.0 if self.respond_async else None


_NO_PREFERENCES = Preferences()


def legal_request_id(value: bytes | None) -> str | None:
    """Return an id that is safe to echo and to log (1 to 128 of `A-Za-z0-9._-`), else None."""
    if value is None or _REQUEST_ID.fullmatch(value) is None:
        return None
    return value.decode("ascii")


def read_preferences(values: Iterable[bytes], *, wait_s_max: float) -> Preferences:
    """Read all `Prefer` headers; the first mention of a preference wins, a malformed one is ignored."""
    found: dict[str, str] = {}
    for value in values:
        if len(value) > PREFER_LENGTH_MAX:
            continue
        text = value.decode("latin-1")
        position = 0
        while position < len(text):
            match = _PREFERENCE.match(text, position)
            if match is not None:
                found.setdefault(match["name"].lower(), (match["value"] or "").strip('"'))
                position = match.end()
            comma = text.find(",", position)
            position = len(text) if comma < 0 else comma + 1
    if not found:
        return _NO_PREFERENCES
    wait = found.get("wait", "")
    wait_s = min(float(wait), float(wait_s_max)) if wait.isascii() and wait.isdigit() else None
    return Preferences(respond_async="respond-async" in found, wait_s=wait_s)


def read_key(values: list[bytes]) -> str | None:
    """Return the Idempotency-Key without its quotes. Raises InvalidRequest for one that is unclear."""
    if not values:
        return None
    value = values[0].strip()
    quoted = _QUOTED.fullmatch(value)
    if quoted is not None:
        key = re.sub(rb"\\(.)", rb"\1", quoted[1])
    else:
        key = value if _BARE.fullmatch(value) else b""
    if len(values) > 1 or not key or len(key) > KEY_LENGTH_MAX:
        raise InvalidRequest(
            "The Idempotency-Key is not usable",
            details={
                "header": "Idempotency-Key",
                "expected": f"one key of 1 to {KEY_LENGTH_MAX} visible ASCII characters, bare or quoted",
                "actual": "several keys" if len(values) > 1 else f"{len(value)} bytes",
            },
        )
    return key.decode("ascii")


def read_destinations(values: list[bytes]) -> tuple[str, ...]:
    """Return the Webhook-URLs in order, without duplicates. Whether they may be used is not decided here."""
    urls: dict[str, None] = {}
    for value in values:
        for url in _NEXT_URL.split(value.decode("latin-1").strip()):
            if not _VISIBLE.fullmatch(url) or len(url) > DESTINATION_LENGTH_MAX:
                raise InvalidRequest(
                    "A Webhook-URL is not usable",
                    details={
                        "header": "Webhook-URL",
                        "expected": f"URLs of 1 to {DESTINATION_LENGTH_MAX} visible ASCII characters",
                        "actual": f"{len(url)} characters",
                    },
                )
            urls[url] = None
    if len(urls) > DESTINATIONS_MAX:
        raise InvalidRequest(
            "There are too many Webhook-URLs",
            details={"header": "Webhook-URL", "expected": f"at most {DESTINATIONS_MAX}", "actual": len(urls)},
        )
    return tuple(urls)


def read_seconds(name: str, value: bytes | None, *, seconds_max: float) -> float | None:
    """Return a number of seconds, clamped; None where there is none. Raises InvalidRequest naming `name`."""
    if value is None:
        return None
    if _SECONDS.fullmatch(value) is None:
        raise InvalidRequest(
            f"{name} is not a number of seconds",
            details={
                "input": name,
                "expected": "a number of seconds, 0 or more",
                "actual": f"{len(value)} bytes",
            },
        )
    return min(float(value), seconds_max)


def check_media_type(headers: Mapping[bytes, bytes], *, binary: bool) -> None:
    """Accept JSON (and raw bytes where `binary`), in UTF-8; no content type at all is accepted too.

    `curl -d` calls everything a form, so that is believed to be JSON too, unless a browser says it: a web page may
    send a form to a server on the same machine without asking, and says its Origin then. Raises UnsupportedMediaType.
    """
    value = headers.get(b"content-type")
    if value is None or (value == _CURL_TYPE and b"origin" not in headers):
        return
    essence, _, parameters = value.lower().partition(b";")
    essence = essence.strip()
    if binary and essence in _BINARY_TYPES:
        return
    known = essence in _JSON_TYPES or (essence.startswith(b"application/") and essence.endswith(b"+json"))
    if known and (b"charset" not in parameters or b"utf-8" in parameters or b"utf8" in parameters):
        return
    raise UnsupportedMediaType(
        "The content type is not supported",
        details={
            "expected": ["application/json; charset=utf-8"] + ["application/octet-stream"] * binary,
            "actual": essence.decode("latin-1")[:80] if _VISIBLE.fullmatch(essence.decode("latin-1")) else "",
        },
    )
