"""Where a webhook may go: what is refused by its form, and which addresses are never connected to.

A destination comes from whoever sends a request, so it is the one place where a stranger tells us to open a
connection. It is checked by its form at ingest (no look-up, no socket) and by its addresses whenever a connection
is made: every address that the name has must be public, and the address that was checked is the one connected to.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import urlsplit

from headrace.errors import InvalidRequest

__all__ = ["DESTINATION_CHARS_MAX", "Address", "Policy", "Target", "address_of"]

DESTINATION_CHARS_MAX = 2048

Address = IPv4Address | IPv6Address

# Printable ASCII without space, quotes, backslash and brackets of markup: what RFC 3986 lets stand in a URL. Anything
# else is where two parsers begin to disagree about the host.
_CHARACTERS = re.compile(r"[!#-;=?-\[\]_a-z~]+", re.ASCII)
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?", re.ASCII)
# A host whose last label is a number is an IPv4 address to browsers and to inet_aton (2130706433, 0x7f.1, 0177.0.0.1).
_NUMERIC = re.compile(r"(.*\.)?(0x[0-9a-f]*|[0-9]+)\.?", re.ASCII)

_LOCAL_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback", "broadcasthost")
_METADATA_NAMES = ("metadata", "metadata.google.internal", "metadata.goog", "instance-data")

# What is_global leaves out or lets through, with the reason.
_REFUSED_V4 = [
    (IPv4Network("192.88.99.0/24"), "6to4 relay"),
    (IPv4Network("168.63.129.16/32"), "cloud metadata"),
    (IPv4Network("169.254.0.0/16"), "link-local, cloud metadata"),
    (IPv4Network("100.64.0.0/10"), "carrier-grade NAT"),
    (IPv4Network("127.0.0.0/8"), "loopback"),
    (IPv4Network("0.0.0.0/8"), "this network"),
    (IPv4Network("224.0.0.0/4"), "multicast"),
]
_REFUSED_V6 = [
    (IPv6Network("::1/128"), "loopback"),
    (IPv6Network("2002::/16"), "6to4"),
    (IPv6Network("2001::/32"), "Teredo"),
    (IPv6Network("64:ff9b:1::/48"), "NAT64 for local use"),
    (IPv6Network("fe80::/10"), "link-local"),
    (IPv6Network("fc00::/7"), "unique local"),
    (IPv6Network("ff00::/8"), "multicast"),
    (IPv6Network("3fff::/20"), "documentation"),
]
_GLOBAL_V6 = IPv6Network("2000::/3")
_NAT64 = IPv6Network("64:ff9b::/96")


@dataclass(frozen=True, slots=True)
class Target:
    """A destination that is well formed."""

    scheme: str
    #: Lower case, without the root's dot.
    host: str
    port: int
    #: Set where the host is an address.
    address: Address | None
    #: Path and query, as they were given.
    rest: str = "/"

    @property
    def origin(self) -> str:
        """Return scheme, host and port."""
        host = f"[{self.host}]" if isinstance(self.address, IPv6Address) else self.host
        return f"{self.scheme}://{host}:{self.port}"

    @property
    def url(self) -> str:
        """Return what to connect to, written anew from the parts that were checked.

        Whoever reads this finds the same host as we did, whatever it would have made of the original.
        """
        return self.origin + self.rest


class Policy:
    """Which destinations are allowed."""

    def __init__(self, *, allow_private: bool = False, allow: Sequence[str] = (), only: Sequence[str] = ()) -> None:
        """`allow` lists hosts (`a.internal`, `.internal`) and networks that may be private although
        `allow_private` is off; `only`, where given, lists all that may be sent to."""
        self._allow_private = allow_private
        self._allow = _Patterns(allow)
        self._only = _Patterns(only) if only else None

    def target(self, destination: str) -> Target:
        """Read a destination. Raises InvalidRequest that names the rule it breaks; opens nothing."""
        if not destination or len(destination) > DESTINATION_CHARS_MAX:
            raise _refusal("length", f"a destination has 1 to {DESTINATION_CHARS_MAX} characters")
        scheme, separator, _ = destination.partition("://")
        if not separator or scheme.lower() not in ("http", "https"):
            raise _refusal("scheme", "a webhook is sent to http:// or https://")
        if _CHARACTERS.fullmatch(destination.lower()) is None:
            raise _refusal("characters", "it has characters that must be percent-encoded")
        try:
            parts = urlsplit(destination)
            port = parts.port
        except ValueError as error:
            raise _refusal("form", "its host or port cannot be read") from error
        if "@" in parts.netloc:
            raise _refusal("userinfo", "a user or password in a URL is not sent; sign with HEADRACE_WEBHOOK_SECRET")
        if port == 0:
            raise _refusal("port", "a port is 1 to 65535")
        target = self._target(parts.scheme, parts.netloc, parts.hostname or "", port)
        self._check_host(target)
        query = f"?{parts.query}" if parts.query else ""
        return replace(target, rest=(parts.path or "/") + query)

    def refuses(self, host: str, address: Address) -> str:
        """Return why `address`, of a host of this name, must not be connected to; "" if it may be."""
        if self._only is not None and not self._only.match(host, address):
            return "not in HEADRACE_WEBHOOK_ONLY"
        if self._allow_private or self._allow.match(host, address):
            return ""
        return _not_public(address)

    def _target(self, scheme: str, netloc: str, host: str, port: int | None) -> Target:
        port = port or (443 if scheme == "https" else 80)
        if "[" in netloc:
            try:
                address: Address = IPv6Address(host)
            except ValueError as error:
                raise _refusal("host", "its IPv6 address cannot be read") from error
            if "%" in host:
                raise _refusal("host", "an IPv6 zone means something on one machine only")
            return Target(scheme, str(address), port, address)
        if _NUMERIC.fullmatch(host):
            try:
                address = IPv4Address(host.removesuffix("."))
            except ValueError as error:
                # Also the odd ones that would be public: two readers must not see two addresses.
                raise _refusal("host", "write an IPv4 address as four decimal numbers") from error
            return Target(scheme, str(address), port, address)
        if len(host) > 253 or _HOST_NAME.fullmatch(host) is None:
            raise _refusal("host", "its host is not a name; write international names in their xn-- form")
        return Target(scheme, host.removesuffix("."), port, None)

    def _check_host(self, target: Target) -> None:
        if target.address is not None:
            reason = self.refuses(target.host, target.address)
            if reason:
                raise _refusal("address", f"that address is not sent to ({reason})")
            return
        if self._only is not None and not self._only.may_match(target.host):
            raise _refusal("address", "that host is not in HEADRACE_WEBHOOK_ONLY")
        if self._allow_private or self._allow.match(target.host, None):
            return
        if target.host in _LOCAL_NAMES or target.host.endswith(".localhost"):
            raise _refusal("address", "that address is not sent to (loopback)")
        if target.host in _METADATA_NAMES:
            raise _refusal("address", "that address is not sent to (cloud metadata)")


class _Patterns:
    """Hosts and networks of a setting."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._names: list[str] = []
        self._networks: list[IPv4Network | IPv6Network] = []
        for text in texts:
            try:
                self._networks.append(ip_network(text.strip("[]"), strict=False))
            except ValueError:
                self._names.append(text.lower().removesuffix("."))

    def match(self, host: str, address: Address | None) -> bool:
        named = any(host.endswith(name) if name.startswith(".") else host == name for name in self._names)
        return named or (address is not None and any(address in network for network in self._networks))

    def may_match(self, host: str) -> bool:
        """Return whether a name can match, by itself or by the address that it will turn out to have."""
        return bool(self._networks) or self.match(host, None)


def _not_public(address: Address) -> str:
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return _not_public(address.ipv4_mapped)
        if address in _NAT64:
            # A resolver on an IPv6-only network answers so for public hosts; what counts is whom it leads to.
            return _not_public(IPv4Address(int(address) & 0xFFFFFFFF))
        for network, reason in _REFUSED_V6:
            if address in network:
                return reason
        return "" if address.is_global and address in _GLOBAL_V6 else "not public"
    for network4, reason in _REFUSED_V4:
        if address in network4:
            return reason
    return "" if address.is_global else "private"


def _refusal(rule: str, text: str) -> InvalidRequest:
    # The destination itself stays out of the message: its query may hold a secret of the receiver's.
    return InvalidRequest(f"Webhook-URL refused: {text}", details={"header": "Webhook-URL", "rule": rule})


def address_of(text: str) -> Address:
    """Read an address as a resolver or a socket gives it, zone included."""
    return ip_address(text.partition("%")[0])
