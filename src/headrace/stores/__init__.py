"""Stores: where results live. An adapter is one file and one row here."""

from __future__ import annotations

import importlib

from headrace.clock import Clock
from headrace.errors import InvalidRequest
from headrace.stores.base import Counts, DeadLetter, Delivery, Finished, Report, Store

__all__ = ["SCHEMES", "Counts", "DeadLetter", "Delivery", "Finished", "Report", "Store", "open_store"]

#: Scheme of the URL → module, imported on use.
SCHEMES = {
    "memory": "headrace.stores.memory",
    "sqlite": "headrace.stores.sqlite",
}


def open_store(url: str, *, clock: Clock) -> Store:
    """Return the store that `url` names, not yet opened. Raises InvalidRequest for a scheme that nobody knows."""
    scheme = url.partition(":")[0]
    module = SCHEMES.get(scheme)
    if module is None:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise InvalidRequest(f"There is no store for {scheme}://; known: {known}", details={"expected": known})
    made: Store = importlib.import_module(module).connect(url, clock=clock)
    return made
