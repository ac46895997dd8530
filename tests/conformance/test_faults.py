"""The suites notice: each faulty adapter fails the tests that are there to catch its fault."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

SUITE = """
from headrace.testing import {name}, {suite}


class TestIt({suite}):
    def connect(self, folder, clock, **limits):
        return {made}
"""

BROKERS = {
    "MemoryBroker": set(),
    "ForgetfulBroker": {"test_an_attempt_counts_though_its_process_never_said_another_word"},
    "ImmortalClaimsBroker": {
        "test_a_lost_message_is_a_suspect_and_only_claimed_alone",
        "test_an_extended_claim_lives_on_and_then_expires",
        "test_attempts_are_counted_in_company_and_alone",
    },
    "StaleTokenBroker": {"test_a_stale_ack_changes_nothing"},
    "BoundlessBroker": {
        "test_a_full_topic_refuses_and_stores_nothing",
        "test_bytes_are_bounded_too",
        "test_claimed_messages_count_towards_the_limit_and_settled_ones_do_not",
        "test_publishers_at_once_fill_a_topic_exactly",
    },
    "KeylessBroker": {"test_a_keyed_id_is_refused_also_after_its_message_is_gone"},
}
STORES = {
    "MemoryStore": set(),
    "LastWriterStore": {
        "test_many_writers_of_one_id_make_one_result",
        "test_the_first_writer_wins_and_the_loser_changes_nothing",
        "test_two_entries_of_one_id_in_one_call_are_one_result",
    },
    "LeakyOutboxStore": {"test_the_first_writer_wins_and_the_loser_changes_nothing"},
    "UncountedStore": {"test_an_attempt_is_counted_before_it_is_made"},
    "SkippingStore": {
        "test_no_result_is_skipped_while_others_commit",
        "test_results_are_read_in_the_order_of_their_commits",
    },
}


def run(folder: Path, suite: str, name: str) -> tuple[set[str], set[str]]:
    """Run a suite on an adapter in a process of its own; return the tests that passed and those that failed."""
    made = f"{name}(clock, **limits)"
    if name == "ForgetfulBroker":
        made = f'{name}(folder / "t.db", clock, **limits)'
    text = SUITE.format(name=name, suite=suite, made=made)
    if name.startswith("Memory"):
        home = "brokers" if suite == "BrokerSuite" else "stores"
        text = text.replace(f"import {name}, ", "import ") + f"\n\nfrom headrace.{home}.memory import {name}\n"
    file, report = folder / "test_it.py", folder / "report.xml"
    file.write_text(text)
    command = [sys.executable, "-m", "pytest", str(file), "-c", os.devnull, f"--rootdir={folder}"]
    options = ["-p", "no:cacheprovider", "-o", "asyncio_mode=auto", f"--junit-xml={report}", f"--basetemp={folder}/t"]
    ended = subprocess.run([*command, *options], cwd=folder, capture_output=True, timeout=110)
    assert ended.returncode in (0, 1), ended.stdout.decode() + ended.stderr.decode()
    passed, failed = set(), set()
    for case in ElementTree.parse(report).iter("testcase"):
        outcome = {child.tag for child in case}
        test = case.attrib["name"].partition("[")[0]
        assert "error" not in outcome, ended.stdout.decode()
        if "failure" in outcome:
            failed.add(test)
        elif "skipped" not in outcome:
            passed.add(test)
    return passed, failed


@pytest.mark.parametrize("name", BROKERS)
def test_the_suite_catches_a_broker_with_one_fault(name: str, tmp_path: Path) -> None:
    passed, failed = run(tmp_path, "BrokerSuite", name)
    notice(BROKERS[name], passed, failed)


@pytest.mark.parametrize("name", STORES)
def test_the_suite_catches_a_store_with_one_fault(name: str, tmp_path: Path) -> None:
    passed, failed = run(tmp_path, "StoreSuite", name)
    notice(STORES[name], passed, failed)


def notice(expected: set[str], passed: set[str], failed: set[str]) -> None:
    assert expected <= failed, f"not caught by {expected - failed}"
    assert bool(expected) == bool(failed)
    # A faulty adapter that could do nothing at all would be caught by anything, and prove nothing.
    assert len(passed) > len(failed)
