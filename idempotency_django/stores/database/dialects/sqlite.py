"""SQLite."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ....models import IdempotencyKey
from ...records import Claim
from ...rows import Row
from ..faults import Fault
from .base import OWNED, Dialect

_FORMAT = "'%%Y-%%m-%%d %%H:%%M:%%f'"


class SQLite(Dialect):
    """The lock is the database's one write lock, held by the transaction."""

    now = f"STRFTIME({_FORMAT}, 'NOW')"
    shifted = f"STRFTIME({_FORMAT}, 'NOW', %s || ' seconds')"
    left = "(JULIANDAY({}) - JULIANDAY('NOW')) * 86400.0"
    taken = f"UNIQUE constraint failed: {IdempotencyKey._meta.db_table}.key"
    locks_database = True
    statements = {
        # It takes the write lock, in any mode of transactions.
        "lock": "DELETE FROM {table} WHERE 0",
        "read_locked": Dialect.shared["read_locked"].removesuffix(" FOR UPDATE SKIP LOCKED"),
        # The transaction may have only read so far.
        "fence": f"UPDATE {{table}} SET attempt = attempt WHERE {OWNED}",
        "save_step": Dialect.shared["save_step"].removesuffix(" FOR UPDATE"),
        "purge_steps": "DELETE FROM {steps} WHERE record_id IN (SELECT value FROM JSON_EACH(%s))",
        "purge": "DELETE FROM {table} WHERE id IN (SELECT value FROM JSON_EACH(%s))",
    }
    faults = {
        "SQLITE_BUSY": Fault.BUSY,
        "SQLITE_BUSY_RECOVERY": Fault.BUSY,
        "SQLITE_BUSY_SNAPSHOT": Fault.BUSY,
        "SQLITE_BUSY_TIMEOUT": Fault.BUSY,
        "SQLITE_LOCKED": Fault.BUSY,
        "SQLITE_LOCKED_SHAREDCACHE": Fault.BUSY,  # in memory, as a test database may be
        "no such": Fault.MISSING,
    }

    def claim(self, claim: Claim, connection: Any) -> Claim | Row | None:
        operation = claim.operation
        if operation.lease is None:
            self.execute(self.sql["lock"])
            return self.read(operation.key, operation.scope) or claim
        into, values, given = self.insertion(claim, lease=operation.lease)
        with connection.cursor() as cursor:
            cursor.execute(f"{into} VALUES ({values}) ON CONFLICT DO NOTHING", given)
            if cursor.rowcount:
                return replace(claim, record_id=int(cursor.lastrowid))
        return self.read(operation.key, operation.scope)

    def code(self, error: BaseException | None) -> object:
        wrong = ("no such table", "no such column", "has no column")
        if any(each in str(error) for each in wrong):  # which have no code of their own
            return "no such"
        return getattr(error, "sqlite_errorname", None)
