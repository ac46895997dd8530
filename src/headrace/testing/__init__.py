"""What adapters are tested with: suites that are the contracts of the rooms, faulty adapters, the history checker.

Nothing is imported before it is asked for: the models in `testing.models` run in processes that have no pytest.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.testing.brokers import BrokerSuite
    from headrace.testing.faults import (
        BoundlessBroker,
        ForgetfulBroker,
        ImmortalClaimsBroker,
        KeylessBroker,
        LastWriterStore,
        LeakyOutboxStore,
        SkippingStore,
        StaleTokenBroker,
        UncountedStore,
    )
    from headrace.testing.runtimes import RuntimeSuite
    from headrace.testing.stores import StoreSuite

__all__ = [
    "BoundlessBroker",
    "BrokerSuite",
    "ForgetfulBroker",
    "ImmortalClaimsBroker",
    "KeylessBroker",
    "LastWriterStore",
    "LeakyOutboxStore",
    "RuntimeSuite",
    "SkippingStore",
    "StaleTokenBroker",
    "StoreSuite",
    "UncountedStore",
]

_HOMES = {
    "BoundlessBroker": "headrace.testing.faults",
    "BrokerSuite": "headrace.testing.brokers",
    "ForgetfulBroker": "headrace.testing.faults",
    "ImmortalClaimsBroker": "headrace.testing.faults",
    "KeylessBroker": "headrace.testing.faults",
    "LastWriterStore": "headrace.testing.faults",
    "LeakyOutboxStore": "headrace.testing.faults",
    "RuntimeSuite": "headrace.testing.runtimes",
    "SkippingStore": "headrace.testing.faults",
    "StaleTokenBroker": "headrace.testing.faults",
    "StoreSuite": "headrace.testing.stores",
    "UncountedStore": "headrace.testing.faults",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
