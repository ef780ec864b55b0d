"""SQLite."""

from __future__ import annotations

from django.db import connections

from ...records import Operation
from .base import Dialect


class SQLite(Dialect):
    """The lock is the database's one write lock, held by the transaction."""

    now = "STRFTIME('%%Y-%%m-%%d %%H:%%M:%%f', 'NOW')"
    later = "STRFTIME('%%Y-%%m-%%d %%H:%%M:%%f', 'NOW', %s || ' seconds')"
    insert = Dialect.insert + " ON CONFLICT DO NOTHING"
    busy = frozenset(
        {
            "SQLITE_BUSY",
            "SQLITE_BUSY_RECOVERY",
            "SQLITE_BUSY_SNAPSHOT",
            "SQLITE_BUSY_TIMEOUT",
            "SQLITE_LOCKED",
        }
    )

    def claim(self, operation: Operation, token: str) -> int | None:
        with connections[self.using].cursor() as cursor:
            cursor.execute(self.insert_sql, self.values(operation, token))
            return int(cursor.lastrowid) if cursor.rowcount == 1 else None

    def code(self, error: BaseException | None) -> object:
        return getattr(error, "sqlite_errorname", None)
