from __future__ import annotations

import pytest

from headrace.web.exchange import Answer, Exchange
from headrace.web.routes import CACHE_SIZE_MAX, Doc, Route, Router
from headrace.web.site import Site


async def nothing(site: Site, exchange: Exchange) -> Answer:
    return Answer()


def router(*places: str) -> Router:
    pairs = (place.split(" ") for place in places)
    return Router([Route(method, template, nothing, Doc("")) for method, template in pairs])


TABLE = router(
    "POST /predict",
    "POST /predict/{model}",
    "GET /v2/models/{model}",
    "GET /v2/models/{model}/ready",
    "POST /v2/models/{model}/infer",
    "POST /v2/models/{model}/versions/{version}/infer",
    "GET /v2/models/stats",
    "POST /v1/models/{model}:predict",
    "GET /v1/models/{model}",
    "GET /",
)


@pytest.mark.parametrize(
    ("path", "template", "params"),
    [
        (b"/predict", "/predict", {}),
        (b"/predict/", "/predict", {}),
        (b"/predict/echo", "/predict/{model}", {"model": "echo"}),
        (b"/v2/models/echo/infer/", "/v2/models/{model}/infer", {"model": "echo"}),
        (
            b"/v2/models/echo/versions/v10/infer",
            "/v2/models/{model}/versions/{version}/infer",
            {"model": "echo", "version": "v10"},
        ),
        (b"/v2/models/a%20b", "/v2/models/{model}", {"model": "a b"}),
        (b"/v2/models/%E7%8C%AB", "/v2/models/{model}", {"model": "猫"}),
        (b"/v2/models/stats", "/v2/models/stats", {}),
        (b"/v1/models/echo:predict", "/v1/models/{model}:predict", {"model": "echo"}),
        (b"/v1/models/echo", "/v1/models/{model}", {"model": "echo"}),
        (b"/", "/", {}),
    ],
)
def test_a_path_leads_to_its_route(path: bytes, template: str, params: dict[str, str]) -> None:
    for _ in range(2):
        found = TABLE.find(path)
        assert found is not None
        assert (found.template, found.params) == (template, params)


@pytest.mark.parametrize(
    "path",
    [
        b"",
        b"//predict",
        b"/predict//",
        b"/predict/a/b",
        b"/v2/models//infer",
        b"/v2/models/a/b/infer",
        b"/V2/models/a",
        b"/v2",
        b"*",
        b"/v2/models/%ff",
        b"/v1/models/:predict/x",
    ],
)
def test_other_paths_lead_nowhere(path: bytes) -> None:
    assert TABLE.find(path) is None


def test_a10_an_encoded_slash_is_part_of_a_name() -> None:
    found = TABLE.find(b"/v2/models/echo%2Finfer")
    assert found is not None
    assert found.params == {"model": "echo/infer"}


def test_allow_names_every_method_of_a_path() -> None:
    found = TABLE.find(b"/v2/models/echo")
    assert found is not None
    assert found.allow == b"GET, HEAD, OPTIONS"


def test_names_from_outside_do_not_fill_the_memory() -> None:
    table = router("GET /v2/models/{model}")
    for number in range(3 * CACHE_SIZE_MAX):
        assert table.find(b"/v2/models/m%d" % number) is not None
    assert len(table._cache) <= CACHE_SIZE_MAX


def test_two_routes_cannot_stand_in_one_place() -> None:
    with pytest.raises(ValueError, match="two routes"):
        router("GET /a/{x}", "GET /a/{y}")
