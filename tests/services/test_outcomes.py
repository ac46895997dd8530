from __future__ import annotations

import json

import numpy as np
import pytest

from headrace.errors import HeadraceError, InvalidValue, ModelFailed, ModelNotFound, ShapeMismatch
from headrace.message import ErrorRecord
from headrace.services.outcomes import failed, refused, succeeded, unrun
from headrace.services.rendering import answer_of, error_of, pending_view, request_object, view_of, webhook_body
from headrace.services.settings import InferenceSettings
from headrace.stores.base import Delivery
from headrace.tensor import InferAnswer, Tensor
from services.messages import NOW_MS, claim, message

LATER_MS = NOW_MS + 5_000
TTL_MS = 7 * 24 * 3600 * 1000


def answer(*values: float) -> InferAnswer:
    return InferAnswer(
        model="neg", version="3", id="theirs", outputs={"y": Tensor.of(np.array(values, dtype=np.float32))}
    )


def test_an_answer_is_kept_bit_by_bit_with_where_it_came_from() -> None:
    taken = claim(message(request_id="r", client_id="theirs"), company=1, alone=2)
    result = succeeded(taken, answer(1.5, float("nan")), LATER_MS).result
    assert (result.id, result.model, result.model_version) == (taken.message.id, "neg", "3")
    assert (result.accepted_at_ms, result.finished_at_ms, result.attempts) == (NOW_MS, LATER_MS, 3)
    assert answer_of(result).outputs["y"].array.tobytes() == answer(1.5, float("nan")).outputs["y"].array.tobytes()


def test_every_destination_gets_the_same_frozen_body() -> None:
    taken = claim(message(destinations=("https://a/", "https://b/"), request_id="r"))
    finished = succeeded(taken, answer(1.5, float("inf")), LATER_MS)
    assert [destination for destination, _ in finished.outbox] == ["https://a/", "https://b/"]
    first, second = (body for _, body in finished.outbox)
    assert first == second == webhook_body(finished.result)
    shown = json.loads(first, parse_constant=pytest.fail)
    assert (shown["type"], shown["timestamp"]) == ("result.succeeded", "2027-01-15T08:00:05.000Z")
    assert shown["data"]["result"]["outputs"][0]["data"] == [1.5, None]
    assert shown["data"]["deliveries"] == []


def test_a_failure_of_ours_keeps_the_message_and_tells_its_destinations() -> None:
    taken = claim(message(destinations=("https://a/",), request_id="r"))
    finished = failed(taken, ModelFailed("boom", details={"output": "y"}), LATER_MS, version="3")
    assert finished.dead == taken.message
    assert finished.result.error == ErrorRecord(code="model_failed", message="boom", details={"output": "y"})
    shown = json.loads(finished.outbox[0][1])
    assert shown["type"] == "result.failed"
    assert shown["data"]["error"] == {
        "error": "boom",
        "code": "model_failed",
        "details": {"output": "y"},
        "request_id": "r",
        "status": 500,
    }


@pytest.mark.parametrize(
    ("error", "kept"), [(ShapeMismatch(), False), (InvalidValue(), False), (ModelNotFound(), True)]
)
def test_only_what_was_right_when_it_was_accepted_is_kept(error: HeadraceError, kept: bool) -> None:
    assert (failed(claim(), error, LATER_MS).dead is not None) is kept


def test_a_kept_error_can_be_raised_again_and_one_of_a_newer_version_is_internal() -> None:
    again = error_of(ErrorRecord(code="shape_mismatch", message="no", details={"input": "x"}))
    assert (type(again), again.message, again.details) == (ShapeMismatch, "no", {"input": "x"})
    assert error_of(ErrorRecord(code="from_the_future", message="no")).code == "internal"


def test_a_message_that_cannot_be_read_is_given_up_with_its_topic_as_model_and_a_retention_from_now() -> None:
    taken = claim(message(model="", accepted_at_ms=0))
    finished = unrun(taken, InferenceSettings(), LATER_MS, alone=False, ttl_ms=TTL_MS)
    assert finished is not None
    assert (finished.result.model, finished.result.accepted_at_ms) == ("neg", LATER_MS)
    assert finished.dead == taken.message
    assert finished.result.error is not None
    assert finished.result.error.code == "invalid_request"


def code_of(found: object) -> str | None:
    return None if found is None else found.result.error.code  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize(
    ("company", "alone", "is_alone", "code"),
    [
        (1, 0, False, None),  # the first time
        (1, 1, True, None),  # one death in company
        (1, 3, True, None),  # two deaths alone
        (1, 4, True, "model_failed"),  # three
        (20, 0, False, None),  # an engine that hands out in company again: nineteen
        (21, 0, False, "model_failed"),
        (20, 1, True, "model_failed"),
    ],
)
def test_A31_only_deaths_count_and_those_alone_count_for_more(
    company: int, alone: int, is_alone: bool, code: str | None
) -> None:
    taken = claim(company=company, alone=alone)
    assert code_of(unrun(taken, InferenceSettings(), LATER_MS, alone=is_alone, ttl_ms=TTL_MS)) == code


@pytest.mark.parametrize(("late_ms", "code"), [(-1, None), (0, "deadline_exceeded")])
def test_a_message_whose_deadline_passed_is_not_run(late_ms: int, code: str | None) -> None:
    taken = claim(message(expires_at_ms=NOW_MS))
    assert code_of(unrun(taken, InferenceSettings(), NOW_MS + late_ms, alone=False, ttl_ms=TTL_MS)) == code


@pytest.mark.parametrize(("late_ms", "code"), [(0, None), (1, "expired")])
def test_a_message_older_than_the_retention_is_refused(late_ms: int, code: str | None) -> None:
    found = unrun(claim(), InferenceSettings(), NOW_MS + TTL_MS + late_ms, alone=False, ttl_ms=TTL_MS)
    assert code_of(found) == code


def test_the_request_object_has_one_shape_in_every_state() -> None:
    done = succeeded(claim(), answer(1.0), LATER_MS).result
    delivery = Delivery(done.id, "https://a/", "pending", 2, LATER_MS, 500, "it failed")
    shown = [json.loads(pending_view("x", "neg").body), json.loads(view_of(done, [delivery]).body)]
    shown.append(request_object(failed(claim(), ShapeMismatch(), LATER_MS).result))
    assert len({tuple(found) for found in shown}) == 1
    assert [found["status"] for found in shown] == ["pending", "succeeded", "failed"]
    assert shown[1]["deliveries"] == [
        {
            "destination": "https://a/",
            "state": "pending",
            "attempts": 2,
            "next_at_ms": LATER_MS,
            "last_status": 500,
            "last_error": "it failed",
        }
    ]


def test_a_cancelled_message_tells_its_destinations_too() -> None:
    finished = refused(message(destinations=("https://a/",)), ModelFailed(), LATER_MS)
    assert (finished.result.attempts, finished.result.model, finished.dead) == (0, "neg", None)
    assert len(finished.outbox) == 1
