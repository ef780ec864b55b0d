"""SQLite."""

from __future__ import annotations

import json
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from django.db import connections
from django.db.models import QuerySet

from ....models import IdempotencyKey
from ....records import Claim, Operation
from .base import Dialect
from .values import ids_of, tokens_of, values_of


class SQLite(Dialect):
    """The lock is the database's one write lock, held by the transaction."""

    now = "STRFTIME('%%Y-%%m-%%d %%H:%%M:%%f', 'NOW')"
    later = "STRFTIME('%%Y-%%m-%%d %%H:%%M:%%f', 'NOW', %s || ' seconds')"
    left = "(JULIANDAY({lease_expires_at}) - JULIANDAY('NOW')) * 86400.0"
    insert = Dialect.insert + " ON CONFLICT DO NOTHING"
    in_transaction = attrgetter("in_transaction")  # executescript() begins with a COMMIT
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

    delete_batch = "DELETE FROM {target} WHERE {column} IN (SELECT value FROM JSON_EACH(%s))"

    def purge(self, batch: QuerySet[IdempotencyKey, Any]) -> int:
        ids = json.dumps([row["id"] for row in batch])
        steps = self.delete_batch.format(target=self.names["steps"], column="record_id")
        records = self.delete_batch.format(target=self.names["table"], column="id")
        with connections[self.using].cursor() as cursor:
            cursor.execute(steps, [ids])
            cursor.execute(records, [ids])
            return int(cursor.rowcount)

    def claim(self, operation: Operation, token: str) -> int | None:
        with connections[self.using].cursor() as cursor:
            cursor.execute(self.insert_sql, values_of(operation, token))
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

    def _extend_sql(self) -> tuple[str, str]:
        names = self.names
        mine = (
            f"{names['id']} IN (SELECT value FROM JSON_EACH(%s)) "
            f"AND {names['owner_token']} IN (SELECT value FROM JSON_EACH(%s)) "
            f"AND {self._in_progress()}"
        )
        return (
            f"UPDATE {names['table']} SET {names['lease_expires_at']} = {self.later} WHERE {mine}",
            f"SELECT {names['id']} FROM {names['table']} WHERE {mine}",
        )

    def extend(self, claims: Sequence[Claim], seconds: float) -> set[int]:
        with connections[self.using].cursor() as cursor:
            cursor.execute(
                self.extend_sql,
                [seconds, json.dumps(ids_of(claims)), json.dumps(tokens_of(claims))],
            )
            if cursor.rowcount == len(claims):
                return set(ids_of(claims))
        # Whatever is still its owner's now was so then: there are no locks on rows.
        return self.owned(claims)

    def owned(self, claims: Sequence[Claim]) -> set[int]:
        with connections[self.using].cursor() as cursor:
            cursor.execute(
                self.owned_sql, [json.dumps(ids_of(claims)), json.dumps(tokens_of(claims))]
            )
            return {row[0] for row in cursor.fetchall()}

    def is_missing(self, error: BaseException) -> bool:
        wrong = ("no such table", "no such column", "has no column")
        return any(each in str(error) for each in wrong)  # there is no code for it

    def code(self, error: BaseException | None) -> object:
        return getattr(error, "sqlite_errorname", None)
