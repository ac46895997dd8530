"""A service as `up` starts it: its settings are in the environment, its models on the command line."""

from __future__ import annotations

import importlib
import os
from collections.abc import Awaitable, Callable, Sequence

from headrace.assembly.instance import Instance, run_service
from headrace.assembly.sections import load_settings

__all__ = ["ONLY", "QUIET", "SERVICES", "run_child", "service_main"]

#: Tells a child to log nothing, because its parent says what there is to say.
QUIET = "HEADRACE__QUIET"

#: Tells a child which variables are settings, separated by commas; without it, all of ours are.
ONLY = "HEADRACE__ONLY"

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
    environ = dict(os.environ)
    if ONLY in environ:
        names = set(environ[ONLY].split(","))
        environ = {name: value for name, value in environ.items() if name in names}
    settings = load_settings(environ=environ)
    return run_service(service, service_main(service), settings, models, quiet=QUIET in os.environ)
