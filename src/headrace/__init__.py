"""Headrace: machine-learning models behind two roads, one of which never loses a message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.runtimes.python import model

__all__ = ["__version__", "model"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Lazily: `headrace --help`, and every service that runs no model, starts without it.
    if name == "model":
        from headrace.runtimes.python import model

        return model
    raise AttributeError(f"module 'headrace' has no attribute {name!r}")
