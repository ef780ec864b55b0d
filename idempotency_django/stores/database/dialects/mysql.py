"""MariaDB and MySQL."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from django.db import Error as DatabaseFault
from django.db import IntegrityError, OperationalError, connections, transaction
from django.db.models import QuerySet

from ....models import IdempotencyKey
from ...records import Claim, Operation
from .base import Dialect, lock_digest, values_of


class MySQL(Dialect):
    """The lock is a named one of the session, taken before the INSERT and released after COMMIT."""

    vendor = "mysql"
    # record has changed since last read, lock wait timeout, deadlock, the same of the lock on the
    # next number of a table (as InnoDB has it), NOWAIT failed
    busy = frozenset({1020, 1205, 1213, 1467, 3572})
    missing = frozenset({1054, 1146})  # unknown column, table does not exist
    taken = busy | {1062}  # duplicate entry

    def claim(self, operation: Operation, token: str) -> int | None:
        given = values_of(operation, token)
        statement = "claim"
        if operation.lease is not None:
            statement, given["lock"] = "claim_leased", self._lock_name(operation)
        elif not self._lock(operation):
            return None
        with connections[self.using].cursor() as cursor:
            try:
                cursor.execute(self.sql[statement], given)
            except (IntegrityError, OperationalError) as error:
                # Another process was faster, or holds the row: the caller reads the record.
                if self.code(error.__cause__) not in self.taken:
                    raise
                return None
            return int(cursor.lastrowid) if cursor.rowcount == 1 else None

    def extend(self, claims: Sequence[Claim], seconds: float) -> set[int]:
        with transaction.atomic(using=self.using):
            renewed = self._records("lock_owned", claims)
            if renewed:
                free = [claim for claim in claims if claim.record_id in renewed]
                self._execute("extend", {**self._described(free), "seconds": seconds})
        return renewed

    def _described(self, claims: Sequence[Claim]) -> dict[str, Any]:
        return {"claims": json.dumps([(claim.record_id, claim.token) for claim in claims])}

    def lockable(
        self, rows: QuerySet[IdempotencyKey], operation: Operation
    ) -> QuerySet[IdempotencyKey]:
        return rows if self._lock(operation) else rows.none()

    def free(self, locks: Sequence[str]) -> None:
        # Without a connection the session is gone, and its locks with it.
        with suppress(DatabaseFault):
            for name in locks:
                self._execute("unlock_key", {"lock": name})

    def code(self, error: BaseException | None) -> object:
        return error.args[0] if error and error.args else None

    def _lock(self, operation: Operation) -> bool:
        name = self._lock_name(operation)
        [[locked]] = self._rows("lock_key", {"lock": name})
        if not locked:
            return False
        self.remember_lock(
            name
        )  # a session may hold a lock several times, and must release it as often
        return True

    @staticmethod
    def _lock_name(operation: Operation) -> str:
        return f"idempotency:{lock_digest(operation, 16).hex()}"
