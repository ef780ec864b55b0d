"""MariaDB and MySQL."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from django.db import Error as DatabaseFault
from django.db import IntegrityError, OperationalError, connections, transaction
from django.db.models import QuerySet

from ....models import IdempotencyKey
from ...records import Claim, Operation
from .base import Dialect, lock_digest, values_of

_STRINGS: Final = (
    r"'(?:[^'\\]|\\(?s:.))*+(?:'|\\?\Z)|\"(?:[^\"\\]|\\(?s:.))*+(?:\"|\\?\Z)|`[^`]*+(?:`|\Z)"
)
_UNCOMMENTED: Final = re.compile(rf"({_STRINGS})|/\*(?!M?!)(?s:.*?)(?:\*/|\Z)|/\*M?!\d*|\*/")
"""Strings, which stay; comments; and the ends of comments that the server executes."""
_IN_TRANSACTION = 1  # SERVER_STATUS_IN_TRANS of the protocol


class MySQL(Dialect):
    """The lock is a named one of the session, taken before the INSERT and released after COMMIT."""

    vendor = "mysql"
    # record has changed since last read, lock wait timeout, deadlock, the same of the lock on the
    # next number of a table (as InnoDB has it), NOWAIT failed
    busy = frozenset({1020, 1205, 1213, 1467, 3572})
    missing = frozenset({1054, 1146})  # unknown column, table does not exist
    taken = busy | {1062}  # duplicate entry
    # What commits implicitly, too: almost all that is no query of data. Temporary tables do not.
    ends = (
        r"(?:SET\s+STATEMENT\s[^;]*?\sFOR\s+)?(?:COMMIT|ROLLBACK(?!(\s+WORK)?\s+TO\b)|BEGIN(?!\s+NOT\b)|START|TRUNCATE|ALTER|RENAME|"
        r"(CREATE(\s+OR\s+REPLACE)?|DROP)(?!\s+(OR\s+REPLACE\s+)?TEMPORARY\b)|GRANT|REVOKE|LOCK|"
        r"UNLOCK|FLUSH|RESET|OPTIMIZE|REPAIR|CHECK|ANALYZE\s+(LOCAL\s+|NO_WRITE_TO_BINLOG\s+)?TABLE|"
        r"CACHE|LOAD\s+INDEX|INSTALL|UNINSTALL|STOP|CHANGE|SET\s+PASSWORD|"
        r"SET\s+(SESSION\s+|@@(SESSION\.)?)?AUTOCOMMIT)"
    )
    quoted = (
        rf"{_STRINGS}|"
        r"--(?!\S)[^\n]*|#[^\n]*|/\*(?s:.*?)(?:\*/|\Z)"
    )

    def ends_transaction(self, text: str) -> bool:
        if "/*!" in text or "/*M!" in text:  # comments that the server executes
            text = _UNCOMMENTED.sub(lambda part: part[1] or " ", text)
        return super().ends_transaction(text)

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

    @staticmethod
    def in_transaction(driver: Any) -> bool:
        # The server reports it with each reply, but not every driver passes it on.
        status = getattr(driver, "server_status", None)
        return status is None or bool(status & _IN_TRANSACTION)

    def code(self, error: BaseException | None) -> object:
        return error.args[0] if error and error.args else None

    def _lock(self, operation: Operation) -> bool:
        name = self._lock_name(operation)
        [[locked]] = self._rows("lock_key", {"lock": name})
        if not locked:
            return False
        self.hold(name)  # a session may hold a lock several times, and must release it as often
        return True

    @staticmethod
    def _lock_name(operation: Operation) -> str:
        return f"idempotency:{lock_digest(operation, 16).hex()}"
