"""BrokerSuite: what a broker promises, as tests. Subclass it in a test file and say how to connect.

class TestSqlite(BrokerSuite):
    def connect(self, folder, clock, **limits):
        return open_broker(f"sqlite:///{folder}/t.db", clock=clock, **limits)

It needs pytest and pytest-asyncio. What an engine declares that it lacks (`Features`) is skipped, nothing else.
"""

import pytest

pytest.register_assert_rewrite(
    *(f"headrace.testing.brokers.{name}" for name in ("bench", "publishing", "claiming", "settling"))
)

from headrace.testing.brokers.bench import Opened  # noqa: E402 - only now are their asserts rewritten
from headrace.testing.brokers.claiming import ClaimingSuite  # noqa: E402
from headrace.testing.brokers.publishing import PublishingSuite  # noqa: E402
from headrace.testing.brokers.settling import SettlingSuite  # noqa: E402

__all__ = ["BrokerSuite", "Opened"]


class BrokerSuite(PublishingSuite, ClaimingSuite, SettlingSuite):
    """Every line of the contract in `brokers/base.py`."""
