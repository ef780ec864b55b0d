"""What is in the bank's database."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from idempotency_django.testing import eventually
from tests.e2e.databases import Database, connect

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

    def __str__(self) -> str:
        return self.database.name

    def __enter__(self) -> State:
        self._connection = connect(self.database.url)
        self._left = _LEFT[self.database.name]
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
        rows = self.all("SELECT kind FROM bank_effect WHERE reference = %s", order.reference)
        return tuple(sorted(kind for (kind,) in rows))

    def row(self, order: Order) -> Row | None:
        """What the store has of it."""
        found = self.all(
            "SELECT status, attempt, (SELECT count(*) FROM idempotency_django_idempotencystep"
            f" WHERE record_id = found.id), {self._left} FROM idempotency_django_idempotencykey"
            " found WHERE found.key = %s",
            order.key,
        )
        return Row(*found[0]) if found else None

    def wait_for_end_of_leases(self) -> None:
        """Return when no claim lives, by the store's clock."""
        eventually(
            lambda: (
                not self.all(
                    "SELECT 1 FROM idempotency_django_idempotencykey"
                    f" WHERE {self._left} > 0 LIMIT 1"
                )
            )
        )

    def all(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """All rows of a statement."""
        if self.database.name == "sqlite":
            statement = statement.replace("%s", "?")
        with closing(self._connection.cursor()) as cursor:
            cursor.execute(statement, values)
            return list(cursor.fetchall())


_LEFT = {
    "postgres": "extract(epoch FROM lease_expires_at - statement_timestamp())",
    "mariadb": "timestampdiff(MICROSECOND, utc_timestamp(6), lease_expires_at) / 1e6",
    "sqlite": "(julianday(lease_expires_at) - julianday('now')) * 86400.0",
}
"""The seconds that are left of a lease, by the store's clock."""
