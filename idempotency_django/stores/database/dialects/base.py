"""What differs between databases on the hot path: how a key is locked, and the SQL.

The statements are composed once per kind of database from the model's own metadata, as Django's
database cache backend does: building them through the ORM for each request would take longer than
running them. On every database, the unique index makes two owners impossible. The lock tells a
duplicate at once that it is one; the index alone would make it wait.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from django.db import connections
from django.db.models import QuerySet

from ....models import GRACE, IdempotencyKey, IdempotencyStep
from ....records import Claim, Operation, Status, Step
from ...codec import StoredStep
from .messages import CombinedMessages

_GIVEN = "key scope operation fingerprint owner_token principal method path caused_by hold".split()
_CONSTANT = {
    "status": f"'{Status.IN_PROGRESS}'",
    "attempt": "1",
    "response_headers": "'[]'",
    "error": "''",
    "replay_count": "0",
}
_SELECTED = "id status attempt fingerprint response_status response_headers response_body".split()
# Space and comments before a statement. Possessive, so that nothing of it is looked at twice.
_BEFORE = r"(?:\s|;|--[^\n]*|#[^\n]*|/\*(?s:.*?)\*/)*+"
_STEP = "record position name attempt result failure completed_at".split()


class Dialect(ABC):
    """The hot path's SQL for one kind of database."""

    now: ClassVar[str]
    later: ClassVar[str]
    """``now`` plus a parameter of seconds; NULL stays NULL."""
    left: ClassVar[str]
    """The seconds until a lease ends, as a float; NULL stays NULL."""
    insert: ClassVar[str] = "INSERT INTO {table} ({columns}) VALUES ({values})"
    lock: ClassVar[str] = " FOR UPDATE"
    returning: ClassVar[str] = ""
    """What makes a statement return the id of a row that it writes, where that can be asked for."""
    busy: ClassVar[frozenset[object]]
    """The error codes of conflicts with another transaction."""
    read_only: ClassVar[frozenset[object]] = frozenset()
    """Those that say that nothing can be written, if they are not operational errors."""
    missing: ClassVar[frozenset[object]] = frozenset()
    """Those that say that a table or a column does not exist."""
    ends: ClassVar[str] = r"COMMIT|END|ROLLBACK(?!(\s+(WORK|TRANSACTION))?\s+TO\b)"
    """Matches the beginning of a statement that ends the transaction that it is executed in."""
    aside: ClassVar[str] = ""
    """Matches strings and comments, where a cursor may be given several statements at once.

    What is not closed is one up to the end, so that nothing of it is looked at twice.
    """

    combines: ClassVar[bool] = False
    """Whether it can send several statements in one message: :meth:`messages`."""
    locks_sessions: ClassVar[bool] = False
    """Whether it has locks that no transaction ends: :meth:`begin`, :meth:`release`."""
    in_transaction: Callable[[Any], object]
    """Called with the driver's connection; false: no transaction is known to be open on it."""

    def __init__(self, using: str, *, combine: bool = True) -> None:
        self.using = using
        self.combine = combine
        """Whether several statements may be sent in one message."""
        quote, meta = connections[using].ops.quote_name, IdempotencyKey._meta
        names = {
            "table": quote(meta.db_table),
            "steps": quote(IdempotencyStep._meta.db_table),
            **{field.name: quote(str(field.column)) for field in meta.concrete_fields},
        }
        names["selected"] = ", ".join(names[name] for name in _SELECTED)
        self.names = names
        columns = {
            **dict.fromkeys(_GIVEN, "%s"),
            **_CONSTANT,
            "created_at": self.now,
            "expires_at": self.later,
            "purge_at": self.later,
            "lease_expires_at": self.later,
        }
        self.insert_sql = self.insert.format(
            columns=", ".join(names[name] for name in columns),
            values=", ".join(columns.values()),
            **names,
        )
        self.select_sql = self._select_sql(names)
        self.complete_sql = self._complete_sql(names)
        self.fence_sql = f"SELECT 1 FROM {names['table']} WHERE {self._owned()}{self.lock}"
        self.step_sql = self._step_sql()
        self.extend_sql, self.owned_sql = self._extend_sql()
        self._ends = re.compile(rf"{_BEFORE}({self.ends})\b", re.IGNORECASE)
        self._aside = re.compile(self.aside)

    def _owned(self) -> str:
        """The row of a claim, as long as it is its owner's: id and token."""
        names = self.names
        return f"{names['id']} = %s AND {names['owner_token']} = %s AND {self._in_progress()}"

    def _in_progress(self) -> str:
        return f"{self.names['status']} = '{Status.IN_PROGRESS}'"

    def _select_sql(self, names: dict[str, str]) -> str:
        return (
            f"SELECT {names['selected']}, {names['expires_at']} <= {self.now}, "
            f"COALESCE({names['lease_expires_at']} <= {self.now}, "
            f"{names['created_at']} <= {self.later}), "
            f"{names['hold']}, {self.left.format(**names)} "
            f"FROM {names['table']} "
            f"WHERE {names['key']} = %s AND {names['scope']} = %s"
        )

    def _complete_sql(self, names: dict[str, str]) -> str:
        return (
            f"UPDATE {names['table']} SET {names['status']} = '{Status.COMPLETED}', "
            f"{names['response_status']} = %s, {names['response_headers']} = %s, "
            f"{names['response_body']} = %s, {names['completed_at']} = {self.now}, "
            f"{names['lease_expires_at']} = NULL WHERE {self._owned()}"
            f"{self.returning.format(**names)}"
        )

    def _step_sql(self) -> str:
        quote = connections[self.using].ops.quote_name
        meta = IdempotencyStep._meta
        fields = {field.name: field for field in meta.concrete_fields}
        columns = ", ".join(quote(str(fields[name].column)) for name in _STEP)
        return (
            f"INSERT INTO {quote(meta.db_table)} ({columns}) "
            f"SELECT {self.names['id']}, %s, %s, %s, %s, %s, {self.now} FROM {self.names['table']} "
            f"WHERE {self._owned()}{self.lock}{self.returning.format(**self.names)}"
        )

    @abstractmethod
    def _extend_sql(self) -> tuple[str, str]:
        """How to renew the leases of several claims, and how to ask which are their owners'."""

    @abstractmethod
    def extend(self, claims: Sequence[Claim], seconds: float) -> set[int]:
        """Renew the leases that are their owners' and that nobody has locked; their records.

        It takes as many statements for a thousand claims as for one, and waits for none of them.
        """

    @abstractmethod
    def owned(self, claims: Sequence[Claim]) -> set[int]:
        """The records of those claims that are their owners', locked or not."""

    @abstractmethod
    def purge(self, batch: QuerySet[IdempotencyKey, Any]) -> int:
        """Delete the rows whose ids a query locks and gives, and their steps; how many?"""

    @abstractmethod
    def claim(self, operation: Operation, token: str) -> int | None:
        """Insert the operation's row and lock its key; ``None`` where either cannot be had now."""

    def lockable(
        self, rows: QuerySet[IdempotencyKey], operation: Operation
    ) -> QuerySet[IdempotencyKey]:
        """The rows, narrowed to nothing when the operation's key is locked by somebody else."""
        return rows

    def messages(self) -> CombinedMessages | None:
        """How the statements of a transaction that begins now are sent; ``None``: one by one."""
        return None

    def claimed(self, claim: Claim) -> None:
        """The running transaction holds the claim."""

    def begin(self) -> None:
        """A transaction begins, maybe within another one; :meth:`release` follows each."""

    def release(self) -> None:
        """Free what the end of the transaction does not free, when the outermost has ended."""

    def text_of(self, sql: Any) -> str:
        """What a cursor is given as text: it may be bytes, or one of psycopg's ``Composable``."""
        if isinstance(sql, bytes):
            return sql.decode("utf-8", "replace")
        if hasattr(sql, "as_string"):
            return str(sql.as_string(connections[self.using].connection))
        return str(sql)

    def ends_transaction(self, text: str) -> bool:
        """Whether the statement, or one of several, would end the transaction it is executed in."""
        if self._ends.match(text):
            return True
        if not self.aside or ";" not in text:
            return False
        return any(map(self._ends.match, self._aside.sub(" ", text).split(";")))

    def write(self, claim: Claim, sql: str, parameters: Sequence[Any]) -> bool:
        """Execute what writes a row for the claim, if it is its owner's."""
        with connections[self.using].cursor() as cursor:
            cursor.execute(sql, parameters)
            return bool(cursor.rowcount)

    def fence(self, claim: Claim) -> bool:
        """Lock the claim's row, at the end of a transaction; ``False``: it is not its owner's."""
        with connections[self.using].cursor() as cursor:
            cursor.execute(self.fence_sql, (claim.record_id, claim.token))
            return cursor.fetchone() is not None

    def save_step(self, claim: Claim, step: Step, stored: StoredStep) -> bool:
        """Lock the claim's row likewise, and add a step to it."""
        values = (step.position, step.name, step.attempt, stored.result, stored.failure)
        return self.write_step(self.step_sql, (*values, claim.record_id, claim.token))

    def write_step(self, sql: str, parameters: Sequence[Any]) -> bool:
        """Execute what adds a step to its owner's claim."""
        with connections[self.using].cursor() as cursor:
            cursor.execute(sql, parameters)
            return bool(cursor.rowcount)

    def select(self, key: str, scope: str) -> tuple[Any, ...] | None:
        with connections[self.using].cursor() as cursor:
            cursor.execute(self.select_sql, [-GRACE.total_seconds(), key, scope])
            row: tuple[Any, ...] | None = cursor.fetchone()
            return row

    def is_busy(self, error: BaseException) -> bool:
        """Whether a database error is a conflict with another transaction, not a fault."""
        return self.code(error.__cause__) in self.busy

    def is_read_only(self, error: BaseException) -> bool:
        """Whether a database error says that nothing can be written, for example to a standby."""
        return self.code(error.__cause__) in self.read_only

    def is_missing(self, error: BaseException) -> bool:
        """Whether a database error says that a table or a column does not exist."""
        return self.code(error.__cause__) in self.missing

    @abstractmethod
    def code(self, error: BaseException | None) -> object:
        """The driver's code of an error."""

    def replay(self, operation: Operation) -> tuple[Any, ...] | None:
        """Count a replay of the operation and select it, in one statement where there is one.

        ``None``: it is not completed, expired, a different request, or locked.
        """
        return None
