"""What adapters are tested with: suites that are the contracts of the rooms, faulty adapters, the history checker.

Nothing is imported before it is asked for: the models in `testing.models` run in processes that have no pytest.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.testing.brokers import BrokerSuite
    from headrace.testing.runtimes import RuntimeSuite
    from headrace.testing.stores import StoreSuite

__all__ = ["BrokerSuite", "RuntimeSuite", "StoreSuite"]

_HOMES = {
    "BrokerSuite": "headrace.testing.brokers",
    "RuntimeSuite": "headrace.testing.runtimes",
    "StoreSuite": "headrace.testing.stores",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
