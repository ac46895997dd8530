"""The shipped suite, on every store there is."""

from __future__ import annotations

from pathlib import Path

from headrace.clock import Clock
from headrace.stores import Store, open_store
from headrace.testing import StoreSuite


class TestMemory(StoreSuite):
    def connect(self, folder: Path, clock: Clock) -> Store:
        return open_store("memory://", clock=clock)


class TestSqlite(StoreSuite):
    def connect(self, folder: Path, clock: Clock) -> Store:
        return open_store(f"sqlite:///{folder}/headrace.db", clock=clock)
