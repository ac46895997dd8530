"""The checker finds each kind of broken promise, and finds nothing in a clean run."""

from __future__ import annotations

import pytest

from headrace.testing.history import Ending, History, check


def clean() -> tuple[History, Ending]:
    history = History()
    for name in ("a", "b", "c"):
        history.accept(name, key=f"k{name}", request=name, destinations=["http://r"])
        history.commit(name)
        history.ack(name)
        history.read(name, b"result " + name.encode())
        history.receive(name, "http://r", b"body " + name.encode())
    ending = Ending(results={name: [b"result " + name.encode()] for name in ("a", "b", "c")}, accepted=3)
    return history, ending


def broken(history: History, ending: Ending) -> set[str]:
    return {violation.invariant for violation in check(history, ending, queue_length_max=10)}


def test_a_clean_run_has_no_violation() -> None:
    assert check(*clean(), queue_length_max=10) == []


def lose(history: History, ending: Ending) -> None:
    ending.results = {"a": [b"result a"], "b": [b"result b"]}
    ending.accepted = 2


def double(history: History, ending: Ending) -> None:
    ending.results = {**ending.results, "a": [b"result a", b"result a"]}


def invent(history: History, ending: Ending) -> None:
    ending.results = {**ending.results, "z": [b"?"]}
    ending.accepted = 4


def change(history: History, ending: Ending) -> None:
    history.read("a", b"another")


def two_ids_for_a_key(history: History, ending: Ending) -> None:
    history.accept("b", key="ka", request="a")


def two_requests_for_a_key(history: History, ending: Ending) -> None:
    history.accept("a", key="ka", request="other")


def ack_early(history: History, ending: Ending) -> None:
    history.ack("never committed")


def deliver_nothing(history: History, ending: Ending) -> None:
    history.accept("a", destinations=["http://silent"])


def deliver_another_body(history: History, ending: Ending) -> None:
    history.receive("a", "http://r", b"rendered again")


def deliver_unsigned(history: History, ending: Ending) -> None:
    history.receive("a", "http://r", b"body a", valid=False)


def start_too_often(history: History, ending: Ending) -> None:
    for _ in range(4):
        history.start("a", alone=True)


def harm_a_neighbour(history: History, ending: Ending) -> None:
    ending.failed = {"b"}


def strand(history: History, ending: Ending) -> None:
    ending.claimed = 1
    ending.accepted = 4


def overfill(history: History, ending: Ending) -> None:
    history.waiting_max = 11


def miscount(history: History, ending: Ending) -> None:
    ending.accepted = 7


@pytest.mark.parametrize(
    ("fault", "invariant"),
    [
        (lose, "I1"),
        (double, "I1"),
        (invent, "I2"),
        (change, "I3"),
        (two_ids_for_a_key, "I4"),
        (two_requests_for_a_key, "I4"),
        (ack_early, "I5"),
        (deliver_nothing, "I6"),
        (deliver_another_body, "I6"),
        (deliver_unsigned, "I6"),
        (start_too_often, "I7"),
        (harm_a_neighbour, "I8"),
        (strand, "I9"),
        (overfill, "I10"),
        (miscount, "I11"),
    ],
)
def test_each_broken_promise_is_found_and_named(fault, invariant: str) -> None:  # type: ignore[no-untyped-def]
    history, ending = clean()
    fault(history, ending)
    assert broken(history, ending) == {invariant}


def test_a_repeated_delivery_of_the_same_body_is_allowed_and_counted() -> None:
    history, ending = clean()
    history.receive("a", "http://r", b"body a")
    assert broken(history, ending) == set()
    assert history.deliveries_repeated == 1


def test_a_result_of_an_attempt_with_unknown_outcome_is_no_invention() -> None:
    history, ending = clean()
    invent(history, ending)
    history.unknown = 1
    assert broken(history, ending) == set()


def test_a_message_that_is_meant_to_fail_must_fail() -> None:
    history, ending = clean()
    history.meant_to_fail = {"c"}
    assert broken(history, ending) == {"I8"}
    ending.failed = {"c"}
    assert broken(history, ending) == set()
