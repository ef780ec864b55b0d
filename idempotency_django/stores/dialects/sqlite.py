"""SQLite."""

from __future__ import annotations

from django.db import connections

from ...records import Claim, Operation
from .base import Dialect


class SQLite(Dialect):
    """The lock is the database's one write lock, held by the transaction."""

    now = "STRFTIME('%%Y-%%m-%%d %%H:%%M:%%f', 'NOW')"
    later = "STRFTIME('%%Y-%%m-%%d %%H:%%M:%%f', 'NOW', %s || ' seconds')"
    insert = Dialect.insert + " ON CONFLICT DO NOTHING"
    lock = ""  # there is one write lock; whoever writes in the transaction has it
    busy = frozenset(
        {
            "SQLITE_BUSY",
            "SQLITE_BUSY_RECOVERY",
            "SQLITE_BUSY_SNAPSHOT",
            "SQLITE_BUSY_TIMEOUT",
            "SQLITE_LOCKED",
            "SQLITE_LOCKED_SHAREDCACHE",  # in memory, as a test database may be
        }
    )

    def claim(self, operation: Operation, token: str) -> int | None:
        with connections[self.using].cursor() as cursor:
            cursor.execute(self.insert_sql, self.values(operation, token))
            return int(cursor.lastrowid) if cursor.rowcount == 1 else None

    def fence(self, claim: Claim) -> bool:
        # By a write, which takes the lock where the transaction has only read so far.
        with connections[self.using].cursor() as cursor:
            cursor.execute(
                f"UPDATE {self.names['table']} SET {self.names['attempt']} = "
                f"{self.names['attempt']} WHERE {self._owned()}",
                [claim.record_id, claim.token],
            )
            return bool(cursor.rowcount)

    def code(self, error: BaseException | None) -> object:
        return getattr(error, "sqlite_errorname", None)
