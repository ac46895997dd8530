"""A service as `up` starts it: its settings are in the environment, its models on the command line."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Sequence

from headrace.assembly.instance import Instance, run_service
from headrace.assembly.sections import load_settings

__all__ = ["SERVICES", "run_child", "service_main"]

#: Service → module whose function of the same name runs it; imported on use, since each needs other libraries.
SERVICES = {
    "serve": "headrace.assembly.serve",
    "ingest": "headrace.assembly.ingest",
    "inference": "headrace.assembly.inference",
    "delivery": "headrace.assembly.delivery",
    "prepare": "headrace.assembly.prepare",
}


def service_main(service: str) -> Callable[[Instance], Awaitable[int]]:
    """Return what runs a service. Raises LookupError for one that there is not."""
    main: Callable[[Instance], Awaitable[int]] = getattr(importlib.import_module(SERVICES[service]), service)
    return main


def run_child(service: str, models: Sequence[str]) -> int:
    """Run a service under a supervisor until it has stopped; return its exit code."""
    return run_service(service, service_main(service), load_settings(), models)
