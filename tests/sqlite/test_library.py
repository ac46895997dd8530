"""Which SQLite is fit."""

from __future__ import annotations

from pathlib import Path

import apsw
import pytest

from headrace.brokers import open_broker
from headrace.clock import ManualClock
from headrace.errors import BrokerUnavailable, StoreUnavailable
from headrace.sqlite import check_sqlite
from headrace.stores import open_store


def test_the_library_that_is_installed_is_fit() -> None:
    assert check_sqlite() == []


@pytest.mark.parametrize("version", ["3.51.3", "3.51.10", "3.52.0", "4.0.0", "3.50.7", "3.50.9", "3.44.6"])
def test_versions_that_keep_their_commits_are_fit(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apsw, "sqlite_lib_version", lambda: version)
    assert check_sqlite() == []


@pytest.mark.parametrize("version", ["3.51.2", "3.51", "3.50.6", "3.49.9", "3.45.0", "3.44.5", "3.7.0"])
async def test_versions_that_may_lose_commits_are_refused(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apsw, "sqlite_lib_version", lambda: version)
    (fault,) = check_sqlite()
    assert version in fault
    assert "apsw>=3.51.3" in fault
    url = f"sqlite:///{tmp_path}/t.db"
    with pytest.raises(BrokerUnavailable, match=version):
        await open_broker(url, clock=ManualClock()).open()
    with pytest.raises(StoreUnavailable, match=version):
        await open_store(url, clock=ManualClock()).open()
    assert not (tmp_path / "t.db").exists()


@pytest.mark.parametrize(("option", "lack"), [("OMIT_WAL", "WAL"), ("THREADSAFE=0", "threads")])
def test_builds_without_what_is_needed_are_refused(option: str, lack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apsw, "compile_options", (option,))
    assert [fault for fault in check_sqlite() if lack in fault]
