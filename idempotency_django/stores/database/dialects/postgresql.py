"""PostgreSQL, through psycopg 3 or psycopg2."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, Final

from django.db import Error as DatabaseFault
from django.db import connections, models
from django.db.models import BooleanField, Func, QuerySet, Value

from ....errors import StoreUnavailable
from ....models import GRACE, IdempotencyKey
from ....records import Claim, Operation
from .base import (
    Batching,
    Dialect,
    Row,
    claim_values,
    counts_in_place,
    lock_number,
)
from .pipelining import Deferred, Pipeline, or_lost
from .statements import Parameters

_ONE_BY_ONE: Final = Pipeline(None)
_FUNCTIONS: Final = ("idempotency_acquire_1", "idempotency_complete_1")
_DEFERRABLE: Final = ("complete", "fence", "save_step")  # what may wait for the COMMIT
_GONE: Final = frozenset({"42883", "42501"})  # undefined_function, insufficient_privilege

_has_functions: Final[dict[tuple[object, ...], bool]] = {}
"""Whether a database has the functions."""


class PostgreSQL(Batching):
    """The lock is a transaction-scoped advisory lock, taken inside the INSERT itself.

    It is safe behind PgBouncer in transaction mode and gone when the connection dies. Whoever
    does not get it does not touch the unique index either, where it would have to wait.
    """

    vendor = "postgresql"
    # libpq's PGTransactionStatusType: 0 is connected, and in no transaction.
    in_transaction = attrgetter("info.transaction_status")
    # lock_not_available, serialization_failure, deadlock_detected
    busy = frozenset({"55P03", "40001", "40P01"})
    read_only = frozenset({"25006"})  # read_only_sql_transaction
    missing = frozenset({"42P01", "42703"})  # undefined_table, undefined_column
    # idle_in_transaction_session_timeout, transaction_timeout
    ended = frozenset({"25P03", "25P04"})
    ends = Dialect.ends + r"|ABORT|PREPARE\s+TRANSACTION"
    aside = (
        r"(?<!\w)[eE]'(?:[^'\\]|\\(?s:.))*+(?:'|\\?\Z)|'[^']*+(?:'|\Z)|\"[^\"]*+(?:\"|\Z)|"
        r"(?<![\w$])\$(\w*)\$(?s:.*?)(?:\$\1\$|\Z)|--[^\n]*|/\*(?s:.*?)(?:\*/|\Z)"
    )

    def __init__(self, using: str, *, combine: bool = True, functions: bool = True) -> None:
        super().__init__(using, combine=combine, functions=functions)
        self._local = threading.local()
        self._or_lost = {name: or_lost(self.sql[name]) for name in _DEFERRABLE}
        self._or_lost["complete_by_function"] = self.sql["complete_by_function_or_lost"]

    def purged(self, cursor: Any, given: Parameters) -> int:
        cursor.execute(self.sql["purge"], given)
        ids = [row[0] for row in cursor.fetchall()]
        cursor.execute(self.sql["purge_steps"], {"ids": ids})
        return len(ids)

    def new_pipeline(self) -> Pipeline | None:
        connection = connections[self.using]
        if not self.combine or connection.in_atomic_block:
            return None
        pipeline = self._local.pipeline = Pipeline(connection)
        return pipeline

    @property
    def _pipeline(self) -> Pipeline:
        """That of the running transaction."""
        pipeline: Pipeline = getattr(self._local, "pipeline", _ONE_BY_ONE)
        return pipeline

    def beginning(self) -> AbstractContextManager[None]:
        return self._pipeline.beginning()

    def claimed(self, claim: Claim) -> None:
        self._pipeline.claimed(claim)

    def acquire(self, operation: Operation, token: str) -> int | Row | None:
        if not self._has_functions():
            return super().acquire(operation, token)
        given = claim_values(operation, token)
        given["count"] = counts_in_place(operation)
        given["relaxed"] = self._holds_nothing_else()
        given["grace"] = GRACE.total_seconds()
        try:
            with connections[self.using].cursor() as cursor, self.beginning():
                cursor.execute(self.sql["acquire_by_function"], given)
                [result] = cursor.fetchone()
        except DatabaseFault as error:
            if self.code(error.__cause__) in _GONE:
                _has_functions[self._server()] = False
                raise StoreUnavailable from error
            raise
        if result is None:
            return None
        return int(result[0]) if len(result) == 1 else _row(*result)

    def write_answer(self, claim: Claim, given: Parameters) -> bool:
        statement = "complete_by_function" if self._has_functions() else "complete"
        deferred = Deferred(self.sql[statement], self._or_lost[statement], given)
        return self._pipeline.defer(claim, deferred) or self._found_row(statement, given)

    def _has_functions(self) -> bool:
        """Whether the server has the functions, and they may be called; a process asks once."""
        if not self.functions:
            return False
        known = _has_functions.get(self._server())
        if known is None:
            known = _has_functions[self._server()] = self._look_for_functions()
        return known

    def is_function_gone(self, error: BaseException) -> bool:
        gone = self.code(error.__cause__) in _GONE and _has_functions.get(self._server(), False)
        if gone:
            _has_functions[self._server()] = False
        return gone

    def lacks_functions(self) -> bool:
        return self.functions and not self._look_for_functions()

    def _look_for_functions(self) -> bool:
        with connections[self.using].cursor() as cursor:
            cursor.execute(self.sql["has_functions"], {"functions": [*_FUNCTIONS]})
            return bool(cursor.fetchone()[0])

    def _server(self) -> tuple[object, ...]:
        settings = connections[self.using].settings_dict
        return settings["HOST"], settings["PORT"], settings["NAME"]

    def _holds_nothing_else(self) -> bool:
        """Whether the transaction is ours; in somebody else's there are other things."""
        connection = connections[self.using]
        blocks = len(connection.atomic_blocks)
        ours = connection.get_autocommit() if not blocks else connection.commit_on_exit
        return ours and blocks <= 1

    def claim(self, operation: Operation, token: str) -> int | None:
        given = claim_values(operation, token)
        with connections[self.using].cursor() as cursor, self.beginning():
            cursor.execute(self.sql["claim"], given)
            row = cursor.fetchone()
            return row[0] if row else None

    def write_fence(self, statement: str, given: Parameters) -> bool:
        deferred = Deferred(self.sql[statement], self._or_lost[statement], given)
        return self._pipeline.defer_fenced(deferred) or super().write_fence(statement, given)

    def lockable(
        self, rows: QuerySet[IdempotencyKey], operation: Operation
    ) -> QuerySet[IdempotencyKey]:
        # A row may only be taken over under its key's lock: an INSERT of somebody who had the
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
        with connections[self.using].cursor() as cursor:
            cursor.execute(self.sql[statement], given)
            row: tuple[Any, ...] | None = cursor.fetchone()
            return row


def _row(
    counted: str,
    record_id: str,
    status: str,
    attempt: str,
    fingerprint: str,
    code: str | None,
    headers: str,
    body: str | None,
    *facts: str | None,
) -> Row:
    """The row in a result of ``idempotency_acquire_1``."""
    *flags, lease_left = facts
    columns = (
        int(record_id),
        status,
        int(attempt),
        fingerprint,
        None if code is None else int(code),
        headers,
        None if body is None else bytes.fromhex(body),
        *(flag == "true" for flag in flags),
        None if lease_left is None else float(lease_left),
    )
    return Row(columns, counted == "true")
