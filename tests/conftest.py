"""What is missing is skipped on a laptop and a failure in CI, where nothing may be missing."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from typing import TypeVar

import pytest

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)

#: Not missing, but not to be had: what an adapter declares that it lacks, and what root is not refused.
_NOT_FOR_THIS_ONE = ("Skipped: this engine ", "Skipped: root may ")
#: Gigabytes that CI does not install yet: these tests run where a contributor has them.
_NOT_YET = ("Skipped: needs torch", "Skipped: needs tensorflow", "Skipped: could not import 'torch'")
_NOTHING_MAY_BE_MISSING = bool(os.environ.get("CI"))


def pytest_configure() -> None:
    # In the background or under nohup these are ignored, and stay so in every process that a test starts: that is
    # respected, but it is not what the tests of Ctrl-C are about.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    return _strict(report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    return _strict(report)


def _strict(report: Report) -> Report:
    if _NOTHING_MAY_BE_MISSING and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if reason.startswith(_NOT_FOR_THIS_ONE + _NOT_YET):
            return report
        report.outcome = "failed"
        report.longrepr = f"skipped where nothing may be missing (CI is set): {report.longrepr}"
    return report
