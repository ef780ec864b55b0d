"""The differences between databases on the hot path: the lock of a key, and the SQL.

On every database, the unique index makes two owners impossible. The lock tells a duplicate at once
that it is one; the index alone would make it wait.
"""

from __future__ import annotations

import hashlib
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, ClassVar

from django.db import Error as DatabaseFault
from django.db import connections
from django.db.models import QuerySet

from ....models import GRACE, IdempotencyKey
from ...codec import StoredPayload
from ...records import Claim, Operation, Step
from .pipelining import Pipeline
from .statements import Parameters, statements


def plain(text: str, limit: int) -> str:
    """The text, cut to a column's length and rid of what a database refuses (NUL, surrogates)."""
    return (
        text[:limit].encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")
    )


def lock_digest(operation: Operation, size: int) -> bytes:
    name = f"idempotency_django:{len(operation.key)}:{operation.key}{operation.scope}"
    return hashlib.blake2b(name.encode(), digest_size=size).digest()


def values_of(operation: Operation, token: str) -> dict[str, Any]:
    """The parameters of the statements that claim, besides the lock."""
    ttl = None if operation.ttl is None else operation.ttl.total_seconds()
    return {
        "key": operation.key,
        "scope": operation.scope,
        "operation": plain(operation.name, 255),
        "fingerprint": operation.fingerprint,
        "owner_token": token,
        "principal": plain(operation.principal, 255),
        "method": plain(operation.method, 16),
        "path": plain(operation.path, 2048),
        "caused_by": operation.caused_by,
        "hold": operation.hold,
        "ttl": ttl,
        "kept": None if ttl is None else ttl + operation.retention.total_seconds(),
        "lease": None if operation.lease is None else operation.lease.total_seconds(),
    }


class Dialect(ABC):
    """The hot path's SQL for one kind of database."""

    vendor: ClassVar[str]
    """Django's name of it, and that of the file with its SQL."""
    busy: ClassVar[frozenset[object]]
    """The error codes of conflicts with another transaction."""
    read_only: ClassVar[frozenset[object]] = frozenset()
    """The error codes of a read-only database that are not operational errors."""
    missing: ClassVar[frozenset[object]] = frozenset()
    """The error codes of a missing table or column."""
    ended: ClassVar[frozenset[object]] = frozenset()
    """The error codes of a transaction that the server ended after a timeout."""
    locks_database: ClassVar[bool] = False
    """Whether a transaction that writes locks the database for all others."""

    def __init__(self, using: str, *, combine: bool = True) -> None:
        self.using = using
        self.combine = combine
        """Whether several statements may be sent in one message."""
        self.sql = statements(self.vendor, connections[using].ops.quote_name)
        self._open = threading.local()

    def _cursor(self) -> AbstractContextManager[Any]:
        return connections[self.using].cursor()

    def _execute(self, statement: str, given: Parameters) -> int:
        """Execute a statement; return the number of rows found or written."""
        with self._cursor() as cursor:
            cursor.execute(self.sql[statement], given)
            return int(cursor.rowcount)

    def _rows(self, statement: str, given: Parameters) -> list[tuple[Any, ...]]:
        """The rows that a statement selects."""
        with self._cursor() as cursor:
            cursor.execute(self.sql[statement], given)
            return list(cursor.fetchall())

    def _row(self, statement: str, given: Parameters) -> tuple[Any, ...] | None:
        """The row that a statement selects, or ``None``."""
        rows = self._rows(statement, given)
        return rows[0] if rows else None

    @abstractmethod
    def extend(self, claims: Sequence[Claim], seconds: float) -> set[int]:
        """Renew the leases that are their owners' and that are not locked; their records.

        It takes as many statements for a thousand claims as for one, and waits for none of them.
        """

    def owned(self, claims: Sequence[Claim]) -> set[int]:
        """The records of those claims that are their owners', locked or not."""
        return self._records("owned", claims)

    def _records(self, statement: str, claims: Sequence[Claim], **given: Any) -> set[int]:
        """The records that a statement on claims selects."""
        return {row[0] for row in self._rows(statement, {**self._described(claims), **given})}

    def _described(self, claims: Sequence[Claim]) -> dict[str, Any]:
        """The parameters that describe claims: their records, and their owners' tokens.

        Each token is of one claim only, so that a set of them need not be paired.
        """
        return {
            "ids": json.dumps([claim.record_id for claim in claims]),
            "tokens": json.dumps([claim.token for claim in claims]),
        }

    def purge(self, older_than: timedelta, limit: int) -> int:
        """Delete one batch of purgeable records, with their steps; how many?

        The caller has opened a transaction.
        """
        given = {
            "older_than": older_than.total_seconds(),
            "limit": limit,
            "grace": GRACE.total_seconds(),
        }
        return self._purge(given)

    def _purge(self, given: Parameters) -> int:
        chosen = [row[0] for row in self._rows("choose_purgeable", given)]
        self._execute("purge_steps", {"ids": json.dumps(chosen)})
        return self._execute("purge", {"ids": json.dumps(chosen)})

    def complete(self, claim: Claim, response: StoredPayload) -> bool:
        """Store the response of a claim, if it is its owner's."""
        given = {
            "code": response.status,
            "headers": response.headers,
            "body": response.body,
            "id": claim.record_id,
            "token": claim.token,
        }
        return self.write_response(claim, given)

    def complete_many(self, responses: Sequence[tuple[Claim, StoredPayload]]) -> set[str]:
        """Store the responses of those claims that are their owners'; their tokens."""
        return {claim.token for claim, response in responses if self.complete(claim, response)}

    def claim_many(self, wanted: Sequence[tuple[Operation, str]]) -> dict[str, int]:
        """Insert the rows of new operations, each with its token; return the ids by token."""
        claimed = {token: self.claim(operation, token) for operation, token in wanted}
        return {token: number for token, number in claimed.items() if number is not None}

    @abstractmethod
    def claim(self, operation: Operation, token: str) -> int | None:
        """Insert the operation's row and lock its key; ``None`` where either cannot be had now."""

    def lockable(
        self, rows: QuerySet[IdempotencyKey], operation: Operation
    ) -> QuerySet[IdempotencyKey]:
        """The rows, narrowed to nothing when the operation's key is locked elsewhere."""
        return rows

    def new_pipeline(self) -> Pipeline | None:
        """The messages of a transaction that begins now; ``None``: one for each statement."""
        return None

    def claimed(self, claim: Claim) -> None:
        """The running transaction holds the claim."""

    def is_claimed(self, key: str, scope: str) -> bool:
        """Whether an open transaction of this process is known to hold a claim on the key."""
        return False

    def begin(self) -> None:
        """A transaction begins, maybe within another one; :meth:`release` follows each."""
        self._open.depth = getattr(self._open, "depth", 0) + 1

    def remember_lock(self, lock: Any) -> None:
        """The running transaction holds something that its end does not free."""
        self._open.locks = [*getattr(self._open, "locks", []), lock]

    def release(self) -> None:
        """Free what the transaction holds, when the outermost has ended."""
        self._open.depth -= 1
        if not self._open.depth and (locks := getattr(self._open, "locks", [])):
            self._open.locks = []
            self.free(locks)

    def free(self, locks: Sequence[Any]) -> None:
        """Free what a transaction of this thread has held."""

    def write_response(self, claim: Claim, given: Parameters) -> bool:
        """Execute what stores a response."""
        return bool(self._execute("complete", given))

    def fence(self, claim: Claim) -> bool:
        """Lock the claim's row, at the end of a transaction; ``False``: it is not its owner's."""
        return self.write_fence("fence", {"id": claim.record_id, "token": claim.token})

    def write_fence(self, statement: str, given: Parameters) -> bool:
        """Execute what locks the claim's row, and what may add a step to it."""
        return bool(self._execute(statement, given))

    def save_step(self, claim: Claim, step: Step) -> bool:
        """Lock the claim's row likewise, and add a step to it, which is in the codec's form."""
        given = {
            "name": step.name,
            "attempt": step.attempt,
            "result": step.result,
            "id": claim.record_id,
            "token": claim.token,
        }
        return self.write_fence("save_step", given)

    def read(self, key: str, scope: str) -> tuple[Any, ...] | None:
        return self._row("read", {"key": key, "scope": scope, "grace": GRACE.total_seconds()})

    def read_many(self, names: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Any]:
        """The rows of these keys and scopes, as :meth:`read` has them, by key and scope."""
        return {name: row for name in names if (row := self.read(*name)) is not None}

    def is_busy(self, error: BaseException) -> bool:
        """Whether a database error is a conflict with another transaction, not a fault."""
        return self.code(error.__cause__) in self.busy

    def is_read_only(self, error: BaseException) -> bool:
        """Whether a database error says that nothing can be written, for example to a standby."""
        return self.code(error.__cause__) in self.read_only

    def is_missing(self, error: BaseException) -> bool:
        """Whether a database error says that a table or a column does not exist."""
        return self.code(error.__cause__) in self.missing

    def was_ended_by_server(self, error: BaseException) -> bool:
        """Whether a database error says that the server ended the transaction as too long."""
        return isinstance(error, DatabaseFault) and self.code(error.__cause__) in self.ended

    @abstractmethod
    def code(self, error: BaseException | None) -> object:
        """The driver's code of an error."""

    def replay(self, operation: Operation) -> tuple[Any, ...] | None:
        """Count a replay of the operation and select it, in one statement where there is one.

        ``None``: it is not completed, expired, a different request, or locked.
        """
        return None
