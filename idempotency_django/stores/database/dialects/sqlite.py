"""SQLite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ....models import IdempotencyKey
from ...records import Claim, Status
from ...rows import Row
from ..faults import Fault
from .base import OWNED, PURGEABLE, Dialect

_FORMAT = "'%%Y-%%m-%%d %%H:%%M:%%f'"
_OWNERS = (
    "id IN (SELECT value FROM JSON_EACH(%s)) "
    "AND owner_token IN (SELECT value FROM JSON_EACH(%s)) AND status = 'in_progress'"
)


class SQLite(Dialect):
    """The lock is the database's one write lock, held by the transaction."""

    now = f"STRFTIME({_FORMAT}, 'NOW')"
    shifted = f"STRFTIME({_FORMAT}, 'NOW', %s || ' seconds')"
    left = "(JULIANDAY({}) - JULIANDAY('NOW')) * 86400.0"
    locks_database = True
    statements = {
        # It takes the write lock, in any mode of transactions.
        "lock": "DELETE FROM {table} WHERE 0",
        "read_locked": Dialect.shared["read_locked"].removesuffix(" FOR UPDATE SKIP LOCKED"),
        # The transaction may have only read so far.
        "fence": f"UPDATE {{table}} SET attempt = attempt WHERE {OWNED}",
        "save_step": Dialect.shared["save_step"].removesuffix(" FOR UPDATE"),
        "extend": f"UPDATE {{table}} SET lease_expires_at = {{shifted}} WHERE {_OWNERS}",
        "owned": f"SELECT id FROM {{table}} WHERE {_OWNERS}",
        "choose_purgeable": (
            f"SELECT id FROM {{table}} WHERE {PURGEABLE} ORDER BY purge_at LIMIT %s"
        ),
        "purge_steps": ("DELETE FROM {steps} WHERE record_id IN (SELECT value FROM JSON_EACH(%s))"),
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
        into, values, given = self.insertion(claim, Status.IN_PROGRESS, lease=operation.lease)
        with connection.cursor() as cursor:
            cursor.execute(f"{into} VALUES ({values}) ON CONFLICT DO NOTHING", given)
            if cursor.rowcount:
                return replace(claim, record_id=int(cursor.lastrowid))
        return self.read(operation.key, operation.scope)

    def extend(self, claims: Sequence[Claim], seconds: float) -> set[int]:
        self.execute(self.sql["extend"], seconds, *self.described(claims))
        # SQLite has no row locks: a row that still has its owner now had it then.
        return self.owned(claims)

    def is_taken(self, error: BaseException) -> bool:
        return f"UNIQUE constraint failed: {IdempotencyKey._meta.db_table}.key" in str(error)

    def code(self, error: BaseException | None) -> object:
        wrong = ("no such table", "no such column", "has no column")
        if any(each in str(error) for each in wrong):  # which have no code of their own
            return "no such"
        return getattr(error, "sqlite_errorname", None)
