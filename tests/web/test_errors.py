from __future__ import annotations

import json

import numpy as np
import pytest

from headrace.errors import BY_CODE, HeadraceError, InvalidValue, Overloaded, ShapeMismatch
from headrace.services.statuses import GRPC, HTTP
from headrace.web.errors import documented_rows, error_answer, error_body


def test_every_code_has_its_statuses_and_nothing_else_has() -> None:
    assert set(HTTP) == set(GRPC) == set(BY_CODE)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("invalid_json", 400),
        ("unauthenticated", 401),
        ("forbidden", 403),
        ("version_not_found", 404),
        ("method_not_allowed", 405),
        ("expired", 410),
        ("too_large", 413),
        ("unsupported_media_type", 415),
        ("idempotency_conflict", 422),
        ("overloaded", 429),
        ("cancelled", 499),
        ("model_failed", 500),
        ("out_of_memory", 500),
        ("not_ready", 503),
        ("deadline_exceeded", 504),
        ("storage_full", 507),
    ],
)
def test_the_statuses_are_those_of_the_design(code: str, status: int) -> None:
    assert HTTP[code] == status


def test_the_body_has_exactly_the_documented_members() -> None:
    error = ShapeMismatch(details={"input": "x", "expected": [-1, 128], "actual": [1, 127]})
    assert json.loads(error_body(error, "r-1")) == {
        "error": "Shape mismatch",
        "code": "shape_mismatch",
        "details": {"input": "x", "expected": [-1, 128], "actual": [1, 127]},
        "request_id": "r-1",
        "status": 400,
    }


def test_retry_after_is_whole_seconds_rounded_up_and_only_where_computed() -> None:
    assert (b"retry-after", b"3") in error_answer(Overloaded(retry_after_s=2.1), "r").headers
    assert (b"retry-after", b"1") in error_answer(Overloaded(retry_after_s=0.0), "r").headers
    assert error_answer(Overloaded(), "r").headers == []


@pytest.mark.parametrize("value", [np.float32(1), {"a": object()}, "\ud800", {1: object()}, float("nan")])
def test_an_error_can_be_told_whatever_is_in_its_details(value: object) -> None:
    body = json.loads(error_body(InvalidValue("no \ud800", details={"actual": value}), "r"))
    assert body["code"] == "invalid_value"
    assert isinstance(body["error"], str)


def test_every_row_says_what_it_means() -> None:
    rows = documented_rows()
    assert [row[1] for row in rows] == sorted(row[1] for row in rows)
    assert all(row[5].endswith(".") for row in rows)
    assert {row[3] for row in rows} == {"caller", "nobody", "ours"}


def test_an_error_that_is_in_no_table_is_ours() -> None:
    class Strange(HeadraceError):
        """Strange."""

        code = "strange"

    assert error_answer(Strange(), "r").status == 500
