"""PostgreSQL, through psycopg 3 or psycopg2."""

from __future__ import annotations

import json
import threading
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from django.db import connections, models
from django.db.models import BooleanField, Func, QuerySet, Value

from ....models import GRACE, IdempotencyKey
from ...codec import StoredPayload
from ...records import Claim, Operation
from .base import Dialect, lock_digest, values_of
from .pipelining import Deferred, Pipeline, or_lost
from .statements import Parameters

_ONE_BY_ONE: Final = Pipeline(None)
_DEFERRABLE: Final = ("complete", "fence", "save_step")  # sent together with the COMMIT


class PostgreSQL(Dialect):
    """The lock is a transaction-scoped advisory lock, taken inside the INSERT itself.

    It is safe behind PgBouncer in transaction mode and gone when the connection dies. A client that
    does not get it does not touch the unique index either, where it would have to wait.
    """

    vendor = "postgresql"
    # lock_not_available, serialization_failure, deadlock_detected
    busy = frozenset({"55P03", "40001", "40P01"})
    read_only = frozenset({"25006"})  # read_only_sql_transaction
    missing = frozenset({"42P01", "42703"})  # undefined_table, undefined_column
    # idle_in_transaction_session_timeout, transaction_timeout
    ended = frozenset({"25P03", "25P04"})

    def __init__(self, using: str, *, combine: bool = True) -> None:
        super().__init__(using, combine=combine)
        self._local = threading.local()
        self._or_lost = {name: or_lost(self.sql[name]) for name in _DEFERRABLE}

    def _purge(self, given: Parameters) -> int:
        ids = [row[0] for row in self._rows("purge", given)]
        self._execute("purge_steps", {"ids": ids})
        return len(ids)

    def new_pipeline(self) -> Pipeline | None:
        connection = connections[self.using]
        if not self.combine or connection.in_atomic_block:
            return None
        pipeline = self._local.pipeline = Pipeline(connection)
        return pipeline

    @property
    def _pipeline(self) -> Pipeline:
        """The messages of the running transaction."""
        pipeline: Pipeline = getattr(self._local, "pipeline", _ONE_BY_ONE)
        return pipeline

    @contextmanager
    def _cursor(self) -> Iterator[Any]:
        with connections[self.using].cursor() as cursor, self._pipeline.beginning():
            yield cursor

    def claimed(self, claim: Claim) -> None:
        self._pipeline.claimed(claim)

    def write_response(self, claim: Claim, given: Parameters) -> bool:
        deferred = Deferred(self.sql["complete"], self._or_lost["complete"], given)
        return self._pipeline.defer(claim, deferred) or super().write_response(claim, given)

    def _holds_nothing_else(self) -> bool:
        """Whether the transaction is the store's own; in any other there are other things."""
        connection = connections[self.using]
        blocks = len(connection.atomic_blocks)
        ours = connection.get_autocommit() if not blocks else connection.commit_on_exit
        return ours and blocks <= 1

    def claim(self, operation: Operation, token: str) -> int | None:
        row = self._row("claim", claim_values(operation, token))
        return row[0] if row else None

    def claim_many(self, wanted: Sequence[tuple[Operation, str]]) -> dict[str, int]:
        rows = [claim_values(operation, token) for operation, token in wanted]
        return dict(self._rows("claim_many", {"rows": json.dumps(rows)}))

    def read_many(self, names: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Any]:
        given = {
            "keys": [key for key, _ in names],
            "scopes": sorted({scope for _, scope in names}),
            "grace": GRACE.total_seconds(),
        }
        return {(key, scope): row for key, scope, *row in self._rows("read_many", given)}

    def complete_many(self, responses: Sequence[tuple[Claim, StoredPayload]]) -> set[str]:
        rows = json.dumps([_described_response(claim, response) for claim, response in responses])
        given = {"responses": rows, "ids": [claim.record_id for claim, _ in responses]}
        return {token for (token,) in self._rows("complete_many", given)}

    def write_fence(self, statement: str, given: Parameters) -> bool:
        deferred = Deferred(self.sql[statement], self._or_lost[statement], given)
        return self._pipeline.defer_fenced(deferred) or super().write_fence(statement, given)

    def lockable(
        self, rows: QuerySet[IdempotencyKey], operation: Operation
    ) -> QuerySet[IdempotencyKey]:
        # A row may only be taken over under its key's lock: an INSERT of a transaction that had the
        # lock while the row is being updated here would wait for this transaction to end.
        lock = Func(
            Value(lock_number(operation), output_field=models.BigIntegerField()),
            function="pg_try_advisory_xact_lock",
            output_field=BooleanField(),
        )
        return rows.filter(lock)

    def extend(self, claims: Sequence[Claim], seconds: float) -> set[int]:
        return self._records("extend", claims, seconds=seconds)

    def _described(self, claims: Sequence[Claim]) -> dict[str, Any]:
        return {
            "ids": [claim.record_id for claim in claims],
            "tokens": [claim.token for claim in claims],
        }

    def code(self, error: BaseException | None) -> object:
        return getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)

    def replay(self, operation: Operation) -> tuple[Any, ...] | None:
        statement = "replay_relaxed" if self._holds_nothing_else() else "replay"
        given: Parameters = {
            "key": operation.key,
            "scope": operation.scope,
            "fingerprint": operation.fingerprint,
            "lock": lock_number(operation),
        }
        return self._row(statement, given)


def lock_number(operation: Operation) -> int:
    """The number of the advisory lock on the operation's key."""
    return int.from_bytes(lock_digest(operation, 8), signed=True)


def claim_values(operation: Operation, token: str) -> dict[str, Any]:
    """The parameters of the statements that claim; durations as PostgreSQL writes intervals."""
    values = values_of(operation, token)
    values["lock"] = lock_number(operation)
    for name in ("ttl", "kept", "lease"):
        if values[name] is not None:
            values[name] = f"{values[name]:f} seconds"
    return values


def _described_response(claim: Claim, response: StoredPayload) -> dict[str, Any]:
    return {
        "id": claim.record_id,
        "token": claim.token,
        "code": response.status,
        "headers": response.headers,
        "body": None if response.body is None else b64encode(response.body).decode(),
    }
