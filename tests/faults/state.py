"""What is in the bank's database."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any

from idempotency_django.testing import eventually
from tests.e2e.databases import Database

from .processes import Order


@dataclass(frozen=True)
class Row:
    """What the store has of an operation; ``left`` are the seconds of its lease, by its clock."""

    status: str
    attempt: int
    steps: int
    left: float | None


class State:
    """Looks at the database over a connection of its own, one that no fault is on the way of."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.url = database.url

    def __enter__(self) -> State:
        import psycopg  # not at the top: there is none when the tests run on psycopg2

        self._connection = psycopg.connect(self.url, autocommit=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._connection.close()

    def effects(self, order: Order) -> tuple[str, ...]:
        """The kind of each thing that was done, in alphabetical order."""
        rows = self._all("SELECT kind FROM bank_effect WHERE reference = %s", order.reference)
        return tuple(sorted(kind for (kind,) in rows))

    def row(self, order: Order) -> Row | None:
        """What the store has of it."""
        found = self._all(
            "SELECT status, attempt, (SELECT count(*) FROM idempotency_django_idempotencystep"
            " WHERE record_id = keys.id), extract(epoch FROM lease_expires_at"
            " - statement_timestamp()) FROM idempotency_django_idempotencykey keys WHERE key = %s",
            order.key,
        )
        return Row(*found[0]) if found else None

    def wait_for_end_of_leases(self) -> None:
        """Return when no claim lives, by the store's clock."""
        eventually(
            lambda: (
                not self._all(
                    "SELECT 1 FROM idempotency_django_idempotencykey"
                    " WHERE lease_expires_at > statement_timestamp() LIMIT 1"
                )
            )
        )

    def _all(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        return self._connection.execute(statement, values).fetchall()
