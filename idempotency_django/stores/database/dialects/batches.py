"""Several operations in one statement, as PostgreSQL can.

Each statement takes its rows as one parameter of JSON, so that it is the same for any number.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from base64 import b64encode
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from django.db import connections

from ....models import GRACE
from ....records import Claim, Operation
from ...codec import StoredPayload
from .base import Dialect
from .values import VALUES, lock_number, values_of


class Batching(Dialect):
    """A dialect that claims, selects and completes many rows in one statement each."""

    # The row of each operation that is new, and whose key's lock can be had without waiting.
    claim_many_sql: ClassVar[str] = """
INSERT INTO {table} (
    {key}, {scope}, {operation}, {fingerprint}, {owner_token}, {principal}, {method}, {path},
    {caused_by}, {hold}, {expires_at}, {purge_at}, {lease_expires_at}, {created_at},
    {status}, {attempt}, {response_headers}, {error}, {replay_count}
)
SELECT
    key, scope, operation, fingerprint, owner_token, principal, method, path, caused_by, hold,
    STATEMENT_TIMESTAMP() + ttl * INTERVAL '1 second',
    STATEMENT_TIMESTAMP() + kept * INTERVAL '1 second',
    STATEMENT_TIMESTAMP() + lease * INTERVAL '1 second',
    STATEMENT_TIMESTAMP(), 'in_progress', 1, '[]', '', 0
FROM json_to_recordset(%(rows)s::json) AS new (
    key text, scope text, operation text, fingerprint text, owner_token text, principal text,
    method text, path text, caused_by text, hold boolean, ttl double precision,
    kept double precision, lease double precision, lock bigint
)
WHERE pg_try_advisory_xact_lock(lock)
ON CONFLICT ({key}, {scope}) DO NOTHING
RETURNING {owner_token}, {id}
"""

    # The records of several keys, each after its name. A join might read the whole table. The
    # scopes are compared once the index has found the keys: it would look for each pair of both.
    select_many_sql: ClassVar[str] = """
SELECT
    {key}, {scope}, {id}, {status}, {attempt}, {fingerprint}, {response_status},
    {response_headers}, {response_body}, {expires_at} <= STATEMENT_TIMESTAMP(),
    COALESCE(
        {lease_expires_at} <= STATEMENT_TIMESTAMP(),
        {created_at} <= STATEMENT_TIMESTAMP() - %(grace)s * INTERVAL '1 second'
    ),
    {hold},
    EXTRACT(EPOCH FROM {lease_expires_at} - STATEMENT_TIMESTAMP())::double precision
FROM {table}
WHERE {key} = ANY (%(keys)s) AND {scope} || '' = ANY (%(scopes)s)
"""

    # The answers of several claims, each as long as it is its owner's. The rows are named twice, so
    # that they are found by their index even if the statistics say that the table is empty.
    complete_many_sql: ClassVar[str] = """
UPDATE {table} SET
    {status} = 'completed', {response_status} = answer.code, {response_headers} = answer.headers,
    {response_body} = decode(answer.body, 'base64'), {completed_at} = STATEMENT_TIMESTAMP(),
    {lease_expires_at} = NULL
FROM json_to_recordset(%(answers)s::json) AS answer (
    id bigint, token text, code integer, headers text, body text
)
WHERE {table}.{id} = ANY (%(ids)s) AND {table}.{id} = answer.id
    AND {owner_token} = answer.token AND {status} = 'in_progress'
RETURNING {owner_token}
"""

    def __init__(self, using: str, *, combine: bool = True) -> None:
        super().__init__(using, combine=combine)
        self._claim_many = self.claim_many_sql.format(**self.names)
        self._select_many = self.select_many_sql.format(**self.names)
        self._complete_many = self.complete_many_sql.format(**self.names)

    def claim_many(self, wanted: Sequence[tuple[Operation, str]]) -> dict[str, int]:
        """Insert the rows of those that are new, each with its token; the ids by token."""
        rows = [_row(operation, token) for operation, token in wanted]
        with connections[self.using].cursor() as cursor, self.beginning():
            cursor.execute(self._claim_many, {"rows": json.dumps(rows)})
            return dict(cursor.fetchall())

    def select_many(self, names: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Any]:
        """The rows of these keys and scopes, as :meth:`select` has them, by key and scope."""
        keys, scopes = [key for key, _ in names], sorted({scope for _, scope in names})
        asked: dict[str, Any] = {"keys": keys, "scopes": scopes, "grace": GRACE.total_seconds()}
        with connections[self.using].cursor() as cursor:
            cursor.execute(self._select_many, asked)
            return {(key, scope): tuple(row) for key, scope, *row in cursor.fetchall()}

    def complete_many(self, answers: Sequence[tuple[Claim, StoredPayload]]) -> set[str]:
        """Store the answers of those claims that are their owners'; their tokens."""
        rows = json.dumps([_answer(claim, answer) for claim, answer in answers])
        ids = [claim.record_id for claim, _ in answers]
        with connections[self.using].cursor() as cursor:
            cursor.execute(self._complete_many, {"answers": rows, "ids": ids})
            return {row[0] for row in cursor.fetchall()}

    @abstractmethod
    def beginning(self) -> AbstractContextManager[None]:
        """The statement in the block may be the first one of a transaction."""


def _row(operation: Operation, token: str) -> dict[str, Any]:
    row = dict(zip(VALUES, values_of(operation, token), strict=True))
    return {**row, "lock": lock_number(operation)}


def _answer(claim: Claim, answer: StoredPayload) -> dict[str, Any]:
    return {
        "id": claim.record_id,
        "token": claim.token,
        "code": answer.status,
        "headers": answer.headers,
        "body": None if answer.body is None else b64encode(answer.body).decode(),
    }
