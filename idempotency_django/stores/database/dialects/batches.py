"""Several operations in one statement, as PostgreSQL can.

Each statement takes its rows as one parameter of JSON, so that it is the same for any number.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from base64 import b64encode
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from django.db import connections

from ....models import GRACE
from ....records import Claim, Operation
from ...codec import StoredPayload
from .base import Dialect
from .values import lock_number, values_of


class Batching(Dialect):
    """A dialect that claims, selects and completes many rows in one statement each."""

    def claim_many(self, wanted: Sequence[tuple[Operation, str]]) -> dict[str, int]:
        """Insert the rows of those that are new, each with its token; the ids by token."""
        rows = [claim_values(operation, token) for operation, token in wanted]
        with connections[self.using].cursor() as cursor, self.beginning():
            cursor.execute(self.sql["claim_many"], {"rows": json.dumps(rows)})
            return dict(cursor.fetchall())

    def read_many(self, names: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Any]:
        """The rows of these keys and scopes, as :meth:`read` has them, by key and scope."""
        keys, scopes = [key for key, _ in names], sorted({scope for _, scope in names})
        parameters: dict[str, Any] = {
            "keys": keys,
            "scopes": scopes,
            "grace": GRACE.total_seconds(),
        }
        with connections[self.using].cursor() as cursor:
            cursor.execute(self.sql["read_many"], parameters)
            return {(key, scope): tuple(row) for key, scope, *row in cursor.fetchall()}

    def complete_many(self, answers: Sequence[tuple[Claim, StoredPayload]]) -> set[str]:
        """Store the answers of those claims that are their owners'; their tokens."""
        rows = json.dumps([_answer(claim, answer) for claim, answer in answers])
        ids = [claim.record_id for claim, _ in answers]
        with connections[self.using].cursor() as cursor:
            cursor.execute(self.sql["complete_many"], {"answers": rows, "ids": ids})
            return {row[0] for row in cursor.fetchall()}

    @abstractmethod
    def beginning(self) -> AbstractContextManager[None]:
        """The statement in the block may be the first one of a transaction."""


def claim_values(operation: Operation, token: str) -> dict[str, Any]:
    """The parameters of the statements that claim; durations as PostgreSQL writes intervals."""
    values = values_of(operation, token)
    values["lock"] = lock_number(operation)
    for name in ("ttl", "kept", "lease"):
        if values[name] is not None:
            values[name] = f"{values[name]:f} seconds"
    return values


def _answer(claim: Claim, answer: StoredPayload) -> dict[str, Any]:
    return {
        "id": claim.record_id,
        "token": claim.token,
        "code": answer.status,
        "headers": answer.headers,
        "body": None if answer.body is None else b64encode(answer.body).decode(),
    }
