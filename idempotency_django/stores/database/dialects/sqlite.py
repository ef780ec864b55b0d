"""SQLite."""

from __future__ import annotations

from collections.abc import Sequence

from django.db import connections

from ...records import Claim, Operation
from .base import Dialect, values_of


class SQLite(Dialect):
    """The lock is the database's one write lock, held by the transaction."""

    vendor = "sqlite"
    locks_database = True
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

    def __init__(self, using: str, *, combine: bool = True) -> None:
        super().__init__(using, combine=combine)
        # Those of open transactions in this process, of all threads: no other can read them.
        self._claims: set[tuple[str, str]] = set()

    def claimed(self, claim: Claim) -> None:
        self._claims.add((claim.key, claim.scope))
        self.remember_lock((claim.key, claim.scope))

    def is_claimed(self, key: str, scope: str) -> bool:
        return (key, scope) in self._claims

    def free(self, locks: Sequence[tuple[str, str]]) -> None:
        self._claims.difference_update(locks)

    def claim(self, operation: Operation, token: str) -> int | None:
        with connections[self.using].cursor() as cursor:
            cursor.execute(self.sql["claim"], values_of(operation, token))
            return int(cursor.lastrowid) if cursor.rowcount == 1 else None

    def extend(self, claims: Sequence[Claim], seconds: float) -> set[int]:
        extended = self._execute("extend", {**self._described(claims), "seconds": seconds})
        if extended == len(claims):
            return {claim.record_id for claim in claims}
        # SQLite has no row locks: a row that still has its owner now had it then.
        return self.owned(claims)

    def is_missing(self, error: BaseException) -> bool:
        wrong = ("no such table", "no such column", "has no column")
        return any(each in str(error) for each in wrong)  # there is no code for it

    def code(self, error: BaseException | None) -> object:
        return getattr(error, "sqlite_errorname", None)
