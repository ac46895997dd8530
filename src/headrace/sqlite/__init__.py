"""The embedded engine: one SQLite file shared by several processes. The only room that imports apsw.

One writer connection per process puts whatever waits into one commit, because an fsync costs the same for one message
and for a hundred. Doorbells wake other processes; polling is the truth.
"""

from headrace.sqlite.connection import Connection, Failure, check_filesystem, check_sqlite, translated
from headrace.sqlite.database import Database, open_database

__all__ = [
    "Connection",
    "Database",
    "Failure",
    "check_filesystem",
    "check_sqlite",
    "open_database",
    "translated",
]
