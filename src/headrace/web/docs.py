"""The page at /docs: made from the OpenAPI document, with nothing loaded from elsewhere; and the other plain pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import msgspec

from headrace.telemetry.exposition import CONTENT_TYPE
from headrace.web.errors import documented_rows
from headrace.web.exchange import Answer, Exchange
from headrace.web.openapi import describe
from headrace.web.routes import Doc, Handler, Route
from headrace.web.site import Site

__all__ = ["document_of", "page", "routes_of_documents"]

_STYLE = """
:root{color-scheme:light dark;--line:#8885;--dim:#888;--ok:#1a7f37;--post:#0969da;--del:#cf222e}
*{box-sizing:border-box}body{font:15px/1.55 system-ui,sans-serif;margin:0 auto;max-width:60rem;padding:1.5rem}
h1{font-size:1.5rem;margin:0}h2{font-size:1.1rem;margin:2.2rem 0 .6rem;border-bottom:1px solid var(--line)}
details{border:1px solid var(--line);border-radius:6px;margin:.5rem 0}summary{cursor:pointer;padding:.5rem .8rem}
summary code{font-weight:600}details>div{padding:0 .9rem .8rem}
code,pre{font:13px/1.45 ui-monospace,monospace}pre{background:#8881;border-radius:6px;overflow:auto;padding:.7rem}
table{border-collapse:collapse;width:100%}td,th{border-top:1px solid var(--line);padding:.3rem .5rem;text-align:left;
vertical-align:top}p{margin:.4rem 0}.m{display:inline-block;min-width:4.2rem;font-weight:700}
.get{color:var(--ok)}.post{color:var(--post)}.delete{color:var(--del)}.dim{color:var(--dim)}
"""
_POLICY = b"default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def page(document: Mapping[str, Any]) -> bytes:
    """Return the documentation page of an OpenAPI document."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>Headrace {escape(document['info']['version'])}</title><style>{_STYLE}</style>",
        f"<h1>Headrace <span class=dim>{escape(document['info']['version'])}</span></h1>",
        f"<p>{escape(document['info']['description'])} The same as a document: <a href=openapi.json>openapi.json</a>.",
    ]
    for tag in document["tags"]:
        operations = [
            (method, path, operation)
            for path, methods in document["paths"].items()
            for method, operation in methods.items()
            if tag["name"] in operation["tags"]
        ]
        if operations:
            parts.append(f"<h2>{escape(tag['description'])}</h2>")
            parts.extend(_operation(*operation) for operation in operations)
    parts.append("<h2>Sent to a Webhook-URL</h2>")
    parts.extend(_operation("post", name, item["post"]) for name, item in document["webhooks"].items())
    parts.append(_errors())
    return "".join(parts).encode("utf-8")


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> str:
    out = [
        f"<details><summary><span class='m {method}'>{method.upper()}</span> <code>{escape(path)}</code> "
        f"<span class=dim>{escape(operation['summary'])}</span></summary><div>"
    ]
    if "description" in operation:
        out.append(f"<p>{_prose(operation['description'])}")
    if "parameters" in operation:
        rows = "".join(
            f"<tr><td><code>{escape(each['name'])}</code><td class=dim>{each['in']}<td>{_prose(each['description'])}"
            for each in operation["parameters"]
        )
        out.append(f"<table>{rows}</table>")
    content = operation.get("requestBody", {}).get("content", {})
    example = content.get("application/json", {}).get("example")
    if example is not None:
        text = msgspec.json.encode(example).decode()
        command = f"curl -sS http://127.0.0.1:8000{path} -H 'content-type: application/json' -d '{text}'"
        out.append(f"<pre>{escape(command)}</pre>")
    rows = "".join(
        f"<tr><td><code>{escape(status)}</code><td>{_prose(answer['description'])}"
        for status, answer in operation["responses"].items()
    )
    out.append(f"<table>{rows}</table></div></details>")
    return "".join(out)


def _errors() -> str:
    rows = "".join(
        f"<tr><td>{http}<td><code>{code}</code><td>{grpc}<td>{fault}<td>{'yes' if again else 'no'}<td>{escape(meaning)}"
        for code, http, grpc, fault, again, meaning in documented_rows()
    )
    return (
        "<h2>Errors</h2><p>Every error, on every route: <code>error</code> (a sentence), <code>code</code>, "
        "<code>details</code>, <code>request_id</code>, <code>status</code>."
        "<table><tr><th>HTTP<th>code<th>gRPC<th>fault<th>retry<th>meaning" + rows + "</table>"
    )


def _prose(text: str) -> str:
    """Escape, and set what stands between backticks as code."""
    parts = escape(text).split("`")
    return "".join(f"<code>{part}</code>" if index % 2 else part for index, part in enumerate(parts))


def document_of(others: Sequence[Route]) -> dict[str, Any]:
    """Return the OpenAPI document of these routes and of those that show it."""
    document: dict[str, Any] = msgspec.json.decode(_documents(others)[1]["openapi"])
    return document


def routes_of_documents(others: Sequence[Route]) -> tuple[Route, ...]:
    """Return the routes of /metrics, /docs and /openapi.json; the last two describe themselves too."""
    return _documents(others)[0]


def _documents(others: Sequence[Route]) -> tuple[tuple[Route, ...], dict[str, bytes]]:
    held: dict[str, bytes] = {}

    async def metrics(site: Site, exchange: Exchange) -> Answer:
        return Answer(await site.scrape(), content_type=CONTENT_TYPE)

    async def openapi(site: Site, exchange: Exchange) -> Answer:
        return Answer(held["openapi"])

    async def docs(site: Site, exchange: Exchange) -> Answer:
        return Answer(
            held["docs"],
            content_type=b"text/html; charset=utf-8",
            headers=((b"content-security-policy", _POLICY), (b"x-content-type-options", b"nosniff")),
        )

    def route(path: str, handler: Handler, summary: str, content_type: str) -> Route:
        schema = {"type": "object" if content_type == "application/json" else "string"}
        return Route("GET", path, handler, Doc(summary, answers={200: (summary, content_type, schema)}))

    own = (
        route("/metrics", metrics, "Metrics in the Prometheus text format", "text/plain"),
        route("/openapi.json", openapi, "This description, OpenAPI 3.1", "application/json"),
        route("/docs", docs, "This description, as a page", "text/html"),
    )
    document = describe((*others, *own))
    held["openapi"] = msgspec.json.encode(document)
    held["docs"] = page(document)
    return own, held
