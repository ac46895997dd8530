"""The shipped suite, on every broker there is."""

from __future__ import annotations

from pathlib import Path

from headrace.brokers import Broker, open_broker
from headrace.clock import Clock
from headrace.testing import BrokerSuite


class TestMemory(BrokerSuite):
    def connect(self, folder: Path, clock: Clock, **limits: int) -> Broker:
        return open_broker("memory://", clock=clock, **limits)


class TestSqlite(BrokerSuite):
    def connect(self, folder: Path, clock: Clock, **limits: int) -> Broker:
        return open_broker(f"sqlite:///{folder}/headrace.db", clock=clock, **limits)
