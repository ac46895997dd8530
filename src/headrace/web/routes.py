"""The route table: it drives the dispatch, OpenAPI and the docs page, so that they cannot disagree."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote_to_bytes

from headrace.web.exchange import Answer, Exchange
from headrace.web.site import Site

__all__ = ["Doc", "Handler", "Match", "Parameter", "Route", "Router"]

Handler = Callable[[Site, Exchange], Awaitable[Answer]]

#: Look-ups of paths with names in them are kept, so that a hot route costs one dictionary look-up. Names come
#: from outside: the cache is emptied when it is full.
CACHE_SIZE_MAX = 1024


@dataclass(frozen=True, slots=True)
class Parameter:
    """One documented parameter."""

    name: str
    place: str
    description: str
    schema: Mapping[str, Any] = field(default_factory=lambda: {"type": "string"})


@dataclass(frozen=True, slots=True)
class Doc:
    """What OpenAPI and the docs page say about a route."""

    summary: str
    description: str = ""
    tag: str = "service"
    parameters: Sequence[Parameter] = ()
    #: content type → schema (a JSON Schema, or a reference into `components`); none: no body.
    body: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    body_example: Any = None
    #: status → (description, content type, schema); an empty content type is an answer without a body.
    answers: Mapping[int, tuple[str, str, Mapping[str, Any]]] = field(default_factory=dict)
    #: Error statuses that this route can give, beyond those that every route can.
    errors: Sequence[int] = ()
    #: True where the answer of the long road (202, Location) is possible.
    long_road: bool = False


@dataclass(frozen=True, slots=True)
class Route:
    """One method on one path template; `{name}` stands for one segment, percent-decoded after the split."""

    method: str
    template: str
    handler: Handler
    doc: Doc
    #: "inference" counts in /health with its latency, "lookup" without; "" does not count: it is not the work.
    kind: str = ""


class Match:
    """What a path leads to."""

    __slots__ = ("allow", "methods", "params", "template")

    def __init__(self, template: str, methods: Mapping[str, Route], params: Mapping[str, str]) -> None:
        """Hold the routes of one path, by method, and the names found in it."""
        self.template = template
        self.methods = methods
        self.params = params
        names = {*methods, "OPTIONS"} | ({"HEAD"} if "GET" in methods else set())
        self.allow = ", ".join(sorted(names)).encode("ascii")


class _Node:
    __slots__ = ("literal", "methods", "named", "template")

    def __init__(self) -> None:
        self.literal: dict[str, _Node] = {}
        #: suffix → (name, node): `{model}:predict` has the suffix `:predict`; longest suffix first.
        self.named: dict[str, tuple[str, _Node]] = {}
        self.methods: dict[str, Route] = {}
        self.template = ""


class Router:
    """Finds routes by path; one slash at the end changes nothing, one too many elsewhere is another path."""

    def __init__(self, routes: Sequence[Route]) -> None:
        """Build the table. Raises ValueError for two routes in one place."""
        self.routes = tuple(routes)
        self._root = _Node()
        self._cache: dict[bytes, Match] = {}
        for route in routes:
            node = self._root
            for segment in route.template.split("/")[1:]:
                node = self._grow(node, segment)
            if route.method in node.methods:
                raise ValueError(f"two routes for {route.method} {route.template}")
            node.methods[route.method] = route
            node.template = route.template

    @staticmethod
    def _grow(node: _Node, segment: str) -> _Node:
        if not segment.startswith("{"):
            return node.literal.setdefault(segment, _Node())
        name, _, suffix = segment[1:].partition("}")
        found = node.named.setdefault(suffix, (name, _Node()))
        node.named = dict(sorted(node.named.items(), key=lambda item: -len(item[0])))
        return found[1]

    def find(self, raw_path: bytes) -> Match | None:
        """Return what stands at a path, as it came over the wire and without its query."""
        match = self._cache.get(raw_path)
        if match is None:
            match = self._walk(raw_path)
            if match is not None:
                if len(self._cache) >= CACHE_SIZE_MAX:
                    self._cache.clear()
                self._cache[raw_path] = match
        return match

    def _walk(self, raw_path: bytes) -> Match | None:
        path = raw_path[:-1] if raw_path.endswith(b"/") and len(raw_path) > 1 else raw_path
        node = self._root
        params: dict[str, str] = {}
        for raw in path.split(b"/")[1:]:
            try:
                # Split first, decode then: an encoded slash is part of a name, never of the path.
                segment = unquote_to_bytes(raw).decode("utf-8")
            except UnicodeDecodeError:
                return None
            step = node.literal.get(segment) or self._step_named(node, segment, params)
            if step is None:
                return None
            node = step
        return Match(node.template, node.methods, params) if node.methods else None

    @staticmethod
    def _step_named(node: _Node, segment: str, params: dict[str, str]) -> _Node | None:
        for suffix, (name, child) in node.named.items():
            if segment.endswith(suffix) and len(segment) > len(suffix):
                params[name] = segment[: len(segment) - len(suffix)]
                return child
        return None
