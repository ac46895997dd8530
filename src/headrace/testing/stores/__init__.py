"""StoreSuite: what a store promises, as tests. Subclass it in a test file and say how to connect.

class TestSqlite(StoreSuite):
    def connect(self, folder, clock):
        return open_store(f"sqlite:///{folder}/t.db", clock=clock)

It needs pytest and pytest-asyncio.
"""

import pytest

pytest.register_assert_rewrite(
    *(f"headrace.testing.stores.{name}" for name in ("bench", "results", "outbox", "letters"))
)

from headrace.testing.stores.bench import Opened  # noqa: E402 - only now are their asserts rewritten
from headrace.testing.stores.letters import LettersSuite  # noqa: E402
from headrace.testing.stores.outbox import OutboxSuite  # noqa: E402
from headrace.testing.stores.results import ResultsSuite  # noqa: E402

__all__ = ["Opened", "StoreSuite"]


class StoreSuite(ResultsSuite, OutboxSuite, LettersSuite):
    """Every line of the contract in `stores/base.py`."""
