"""Brokers: where messages wait. An adapter is one file and one row here."""

from __future__ import annotations

import importlib

from headrace.brokers.base import Broker, Claim, Claims, Depth, Features, Receipt
from headrace.clock import Clock
from headrace.errors import InvalidRequest

__all__ = ["SCHEMES", "Broker", "Claim", "Claims", "Depth", "Features", "Receipt", "open_broker"]

#: Scheme of the URL → module, imported on use.
SCHEMES = {
    "memory": "headrace.brokers.memory",
    "sqlite": "headrace.brokers.sqlite",
}


def open_broker(url: str, *, clock: Clock, length_max: int = 1_000_000, bytes_max: int = 4 * 1024**3) -> Broker:
    """Return the broker that `url` names, not yet opened; a topic holds up to `length_max` and `bytes_max`.

    Raises InvalidRequest for a scheme that nobody knows.
    """
    scheme = url.partition(":")[0]
    module = SCHEMES.get(scheme)
    if module is None:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise InvalidRequest(f"There is no broker for {scheme}://; known: {known}", details={"expected": known})
    made: Broker = importlib.import_module(module).connect(url, clock=clock, length_max=length_max, bytes_max=bytes_max)
    return made
