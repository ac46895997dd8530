"""Headrace: machine-learning models behind two roads, one of which never loses a message."""

__all__ = ["__version__"]

__version__ = "0.1.0"
