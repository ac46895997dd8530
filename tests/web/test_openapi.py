from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

import jsonschema
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from headrace.errors import BY_CODE
from headrace.services.door import Accepted, Call
from headrace.tensor import Tensor
from web.kit import FakeDoor, FakeRequests, World, world


async def document(here: World | None = None) -> Any:
    reply = await (here or world()).ask("GET", "/openapi.json")
    assert reply.headers["content-type"] == "application/json"
    return reply.json()


async def test_it_is_valid_openapi() -> None:
    OpenAPIV31SpecValidator(await document()).validate()


async def test_it_has_every_route_that_the_dispatcher_has_and_no_other() -> None:
    here = world()
    found = await document(here)
    told = {(method.upper(), path) for path, methods in found["paths"].items() for method in methods}
    assert told == {(route.method, route.template) for route in here.app.router.routes}
    assert {
        ("POST", "/predict"),
        ("POST", "/v2/models/{model}/infer"),
        ("POST", "/v2/models/{model}/versions/{version}/infer"),
        ("GET", "/v2"),
        ("GET", "/v2/health/live"),
        ("GET", "/v2/health/ready"),
        ("POST", "/v2/repository/index"),
        ("GET", "/health"),
        ("GET", "/requests/{id}"),
        ("DELETE", "/requests/{id}"),
        ("GET", "/requests/{id}/events"),
        ("GET", "/results"),
        ("GET", "/metrics"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
    } <= told


async def test_every_name_in_a_path_is_described_and_every_operation_has_its_own_id() -> None:
    found = await document()
    ids = []
    for path, methods in found["paths"].items():
        for operation in methods.values():
            ids.append(operation["operationId"])
            described = {each["name"] for each in operation.get("parameters", []) if each["in"] == "path"}
            assert described == set(re.findall(r"{(\w+)}", path)), path
    assert len(ids) == len(set(ids))


async def test_it_tells_of_webhooks_and_of_every_code() -> None:
    found = await document()
    assert set(found["webhooks"]) == {"result.succeeded", "result.failed"}
    assert set(found["components"]["schemas"]["Error"]["properties"]["code"]["enum"]) == set(BY_CODE)


def check(found: Any, path: str, method: str, status: int, body: Any) -> None:
    registry = Registry().with_resource("urn:api", Resource.from_contents(found, default_specification=DRAFT202012))
    pointer = f"#/paths/{path.replace('/', '~1').replace('{', '%7B').replace('}', '%7D')}/{method}/responses"
    answers = found["paths"][path][method]["responses"]
    key = str(status) if str(status) in answers else "default"
    schema = {"$ref": f"urn:api{pointer}/{key}/content/application~1json/schema"}
    jsonschema.Draft202012Validator(schema, registry=registry).validate(body)


@pytest.mark.parametrize(
    ("method", "path", "template", "body", "status"),
    [
        ("post", "/predict", "/predict", {"data": [[1, 2, 3]]}, 200),
        ("post", "/predict", "/predict", {"data": [[1, 2]]}, 400),
        ("post", "/predict/none", "/predict/{model}", {"data": [[1, 2]]}, 404),
        (
            "post",
            "/v2/models/echo/infer",
            "/v2/models/{model}/infer",
            {"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}]},
            200,
        ),
        ("get", "/v2", "/v2", None, 200),
        ("get", "/v2/models/echo", "/v2/models/{model}", None, 200),
        ("get", "/v2/models/echo/ready", "/v2/models/{model}/ready", None, 200),
        ("get", "/v2/health/live", "/v2/health/live", None, 200),
        ("get", "/v2/health/ready", "/v2/health/ready", None, 200),
        ("post", "/v2/repository/index", "/v2/repository/index", None, 200),
        ("get", "/health", "/health", None, 200),
        ("get", "/requests/a", "/requests/{id}", None, 200),
        ("get", "/requests/p", "/requests/{id}", None, 202),
        ("get", "/requests/none", "/requests/{id}", None, 404),
        ("delete", "/requests/a", "/requests/{id}", None, 200),
        ("get", "/results", "/results", None, 200),
    ],
)
async def test_answers_are_as_described(method: str, path: str, template: str, body: Any, status: int) -> None:
    requests = FakeRequests()
    requests.put("a", "succeeded")
    requests.put("p")
    here = world(FakeDoor(requests=requests))
    reply = await here.ask(method.upper(), path, b"" if body is None else json.dumps(body).encode())
    assert reply.status == status
    check(await document(here), template, method, status, reply.json())


async def test_an_accepted_request_is_as_described() -> None:
    async def accept(inputs: dict[str, Tensor], call: Call) -> Any:
        return Accepted("m", "echo")

    here = world(FakeDoor(run=accept, requests=FakeRequests()))
    reply = await here.predict([[1, 2, 3]], {"Prefer": "respond-async"})
    check(await document(here), "/predict", "post", reply.status, reply.json())


class Page(HTMLParser):
    """Collects what a page would load, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [f"{tag} {name}={value}" for name, value in attrs if name in ("src", "srcset", "data")]
        if tag in ("script", "link", "iframe", "object", "embed", "img", "base"):
            self.loads.append(tag)

    def handle_data(self, data: str) -> None:
        self.text.append(data)


async def test_the_page_needs_nothing_from_elsewhere_and_tells_every_route_and_code() -> None:
    here = world()
    reply = await here.ask("GET", "/docs")
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    page = Page()
    page.feed(reply.body.decode())
    assert page.loads == []
    assert "url(" not in reply.body.decode()
    text = "".join(page.text)
    for route in here.app.router.routes:
        assert route.template in text
    for code in BY_CODE:
        assert code in text
