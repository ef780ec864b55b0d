"""SQLite."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from operator import attrgetter

from django.db import connections

from ....records import Claim, Operation
from .base import Dialect, ids_of, tokens_of, values_of


class SQLite(Dialect):
    """The lock is the database's one write lock, held by the transaction."""

    vendor = "sqlite"
    locks_database = True
    locks_sessions = True  # in this process: its open transactions' claims, which nobody can read
    in_transaction = attrgetter("in_transaction")  # executescript() begins with a COMMIT
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

    def __init__(self, using: str, **options: bool) -> None:
        super().__init__(using, **options)
        self._claims: set[tuple[str, str]] = set()  # of all threads
        self._held = threading.local()

    def claimed(self, claim: Claim) -> None:
        self._claims.add((claim.key, claim.scope))
        self._held.claims = [*getattr(self._held, "claims", []), (claim.key, claim.scope)]

    def is_claimed(self, key: str, scope: str) -> bool:
        return (key, scope) in self._claims

    def begin(self) -> None:
        self._held.depth = getattr(self._held, "depth", 0) + 1

    def release(self) -> None:
        self._held.depth -= 1
        if not self._held.depth:
            self._claims.difference_update(getattr(self._held, "claims", ()))
            self._held.claims = []

    def claim(self, operation: Operation, token: str) -> int | None:
        with connections[self.using].cursor() as cursor:
            cursor.execute(self.sql["claim"], values_of(operation, token))
            return int(cursor.lastrowid) if cursor.rowcount == 1 else None

    def extend(self, claims: Sequence[Claim], seconds: float) -> set[int]:
        with connections[self.using].cursor() as cursor:
            cursor.execute(self.sql["extend"], {**_arrays(claims), "seconds": seconds})
            if cursor.rowcount == len(claims):
                return set(ids_of(claims))
        # Whatever is still its owner's now was so then: there are no locks on rows.
        return self.owned(claims)

    def owned(self, claims: Sequence[Claim]) -> set[int]:
        with connections[self.using].cursor() as cursor:
            cursor.execute(self.sql["owned"], _arrays(claims))
            return {row[0] for row in cursor.fetchall()}

    def is_missing(self, error: BaseException) -> bool:
        wrong = ("no such table", "no such column", "has no column")
        return any(each in str(error) for each in wrong)  # there is no code for it

    def code(self, error: BaseException | None) -> object:
        return getattr(error, "sqlite_errorname", None)


def _arrays(claims: Sequence[Claim]) -> dict[str, str]:
    return {"ids": json.dumps(ids_of(claims)), "tokens": json.dumps(tokens_of(claims))}
