"""The command line. Errors are one line for people; exit codes are 0 (done), 1 (failed) and 2 (wrong usage)."""

from headrace.cli.main import app, main

__all__ = ["app", "main"]
