"""What differs between databases: the lock of a key, the clock, and the SQL.

On every database, the unique index makes two owners impossible. The lock of a key tells a duplicate
that it is one before its handler runs.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any, ClassVar, Final

from django.db import (
    DatabaseError,
    IntegrityError,
    InterfaceError,
    OperationalError,
    connections,
)

from ....models import STEPS_INDEX, UNIQUE_KEY, IdempotencyKey, IdempotencyStep
from ...codec import StoredPayload
from ...records import Claim, Operation, Status, Step
from ...rows import Row
from ..faults import Fault

_FACTS: Final = (
    "id, status, attempt, fingerprint, owner_token, hold, pinned, response_status, "
    "response_headers, response_body, {lease_left}, {ttl_left}"
)
_DESCRIPTION: Final = (
    *("scope", "fingerprint", "owner_token", "caused_by"),
    *("operation", "principal", "method", "path"),  # see described()
)
OWNED: Final = "id = %s AND owner_token = %s AND status = 'in_progress'"
"""The row of a claim, as long as it is its owner's."""


def plain(text: str, limit: int) -> str:
    """The text, cut to a column's length and rid of what a database refuses (NUL, surrogates)."""
    return (
        text[:limit].encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")
    )


def described(operation: Operation) -> tuple[str, ...]:
    """The name, principal, method and path of an operation as their columns have them."""
    name, path = operation.name[:255], operation.path[:2048]
    texts = (name, operation.principal[:255], operation.method[:16], path)
    if "".join(texts).isprintable():  # nearly always, and all at once
        return texts
    return tuple(plain(text, 2048) for text in texts)


class Dialect(ABC):
    """The SQL for one kind of database, composed from the model's own names.

    Building it through the ORM for each request would take longer than running it.
    """

    now: ClassVar[str]
    """The database's clock when the statement starts."""
    shifted: ClassVar[str]
    """The same, and a parameter's seconds later."""
    left: ClassVar[str]
    """The seconds from then until the time in a column ``{}``."""
    statements: ClassVar[Mapping[str, str]]
    """Its statements, where it has others than ``shared``."""
    faults: ClassVar[Mapping[object, Fault]]
    """What the driver's error codes say."""
    taken: ClassVar[str] = UNIQUE_KEY
    """What its error says if the key has got a row from another transaction."""
    locks_database: ClassVar[bool] = False
    """Whether a transaction that writes locks the database for all others."""
    least_lease: ClassVar[timedelta] = timedelta(minutes=1)
    """The lease of a row whose claim has none. It counts only if the handler commits the row early,
    as ``ALTER TABLE`` does on MariaDB, and its owner dies then.
    """

    shared: ClassVar[Mapping[str, str]] = {
        "read": f"SELECT {_FACTS} FROM {{table}} WHERE {{key}} = %s AND scope = %s",
        "read_locked": f"SELECT {_FACTS} FROM {{table}} WHERE id = %s FOR UPDATE SKIP LOCKED",
        "complete": (
            "UPDATE {table} SET status = 'completed', response_status = %s, response_headers = %s, "
            "response_body = %s, completed_at = {now}, lease_expires_at = NULL, "
            f"expires_at = [expires_at], purge_at = [purge_at] WHERE {OWNED}"
        ),
        # Locks the row of a claim until the transaction ends.
        "fence": f"SELECT 1 FROM {{table}} WHERE {OWNED} FOR UPDATE",
        # Locks it likewise, and adds a step to it.
        "save_step": (
            "INSERT INTO {steps} (record_id, name, attempt, result, completed_at) "
            f"SELECT id, %s, %s, %s, {{now}} FROM {{table}} WHERE {OWNED} FOR UPDATE"
        ),
    }

    def __init__(self, using: str, *, combine: bool = True) -> None:
        self.using = using
        self.combine = combine
        """Whether several statements may be sent in one message."""
        quote = connections[using].ops.quote_name
        self.names = {
            "table": quote(IdempotencyKey._meta.db_table),
            "steps": quote(IdempotencyStep._meta.db_table),
            "steps_index": quote(STEPS_INDEX),
            "key": quote("key"),  # which is a reserved word of MySQL
            "now": self.now,
            "shifted": self.shifted,
            "lease_left": self.left.format("lease_expires_at"),
            "ttl_left": self.left.format("expires_at"),
        }
        templates = {**self.shared, **self.statements}
        self.sql = {name: text.format(**self.names) for name, text in templates.items()}
        self._completion = lru_cache(maxsize=256)(self._compose_completion)
        self._insertion = lru_cache(maxsize=256)(self._compose_insertion)

    def after(self, duration: timedelta | None) -> str:
        """The time that long from now; ``None``: none."""
        if duration is None:
            return "NULL"
        return self.shifted.replace("%s", f"{duration.total_seconds():f}")

    # Asking the database.

    def execute(self, sql: str, *given: Any) -> int:
        """Execute a statement; the number of rows that it found or wrote."""
        with connections[self.using].cursor() as cursor:
            cursor.execute(sql, given)
            return int(cursor.rowcount)

    def count(self, ids: Sequence[int]) -> str:
        """The statement that counts a replay of each of so many records."""
        return self.sql["count"].replace("%s", ", ".join(["%s"] * len(ids)))

    def execute_last(self, sql: str, *given: Any, unsure: bool = True) -> bool:
        """Execute the last statement of a transaction, maybe together with its COMMIT.

        Args:
            sql: the statement.
            given: its parameters.
            unsure: whether it may find no row; then it must not be committed.

        Returns:
            Whether it found a row.
        """
        return bool(self.execute(sql, *given))

    def rows(self, statement: str, *given: Any) -> list[tuple[Any, ...]]:
        """The rows that a statement selects."""
        with connections[self.using].cursor() as cursor:
            cursor.execute(self.sql[statement], given)
            return list(cursor.fetchall())

    def row(self, statement: str, *given: Any) -> Row | None:
        """The row of a key that a statement selects, if there is one."""
        rows = self.rows(statement, *given)
        return Row._make(rows[0]) if rows else None

    def read(self, key: str, scope: str) -> Row | None:
        """The row of a key."""
        return self.row("read", key, scope)

    def read_many(self, names: Sequence[tuple[str, str]]) -> Mapping[tuple[str, str], Row]:
        """The rows of several keys, by key and scope."""
        return {name: row for name in names if (row := self.read(*name)) is not None}

    # Claims.

    @abstractmethod
    def claim(self, claim: Claim, connection: Any) -> Claim | Row | None:
        """Claim a key that has no row, or return its row. ``None``: it is claimed elsewhere.

        With a lease, the claim returned has a row, which all can see. Without one, nothing need be
        written before the response: the running transaction holds the lock of the key.

        Args:
            claim: the wanted one.
            connection: the database's.
        """

    def claim_many(self, claims: Sequence[Claim]) -> Sequence[Claim | Row | None]:
        """:meth:`claim` for several keys, without leases and in their order."""
        connection = connections[self.using]
        return [self.claim(claim, connection) for claim in claims]

    def insertion(
        self,
        claim: Claim,
        response: StoredPayload | None = None,
        *,
        lease: timedelta | None = None,
    ) -> tuple[str, str, tuple[Any, ...]]:
        """The first row of a claim's key: INSERT up to its columns, the values, the parameters.

        It is completed if there is a response, and in progress if there is none.
        """
        operation = claim.operation
        into, values = self._insertion(
            response is not None, operation.ttl, operation.retention, lease, operation.hold
        )
        code, *content = response or (None,)
        given = (
            operation.key,
            operation.scope,
            operation.fingerprint,
            claim.token,
            operation.caused_by,
            *described(operation),
            claim.asked_at - time.monotonic(),
            *content,
        )
        # There are few codes, and a driver that has seen a statement does not parse it again.
        return into, values.format(code=code), given

    def _compose_insertion(
        self,
        completed: bool,
        ttl: timedelta | None,
        retention: timedelta,
        lease: timedelta | None,
        hold: bool,
    ) -> tuple[str, str]:
        columns = [
            # In the order of what insertion() gives.
            *((column, "%s") for column in (self.names["key"], *_DESCRIPTION)),
            ("created_at", self.shifted),
            ("response_headers", "%s" if completed else "'[]'"),
            ("response_body", "%s" if completed else "NULL"),
            # Constants.
            ("response_status", "{code}" if completed else "NULL"),
            ("completed_at", self.now if completed else "NULL"),
            ("status", f"'{Status.COMPLETED if completed else Status.IN_PROGRESS}'"),
            ("attempt", "1"),
            ("hold", str(hold)),
            ("pinned", "False"),
            ("replay_count", "0"),
            ("error", "''"),
            ("lease_expires_at", self.after(lease)),
            ("expires_at", self.after(ttl)),
            ("purge_at", self.after(None if ttl is None else ttl + retention)),
        ]
        names, values = zip(*columns, strict=True)
        return f"INSERT INTO {self.names['table']} ({', '.join(names)})", ", ".join(values)

    def complete(self, claim: Claim, response: StoredPayload, *, last: bool = False) -> bool:
        """Store the response of a claim, if it is its owner's."""
        operation = claim.operation
        if not claim.record_id:
            into, values, given = self.insertion(claim, response)
            sql = f"{into} VALUES ({values})"
        else:
            sql = self._completion(operation.ttl, operation.kept)
            given = (*response, claim.record_id, claim.token)
        if last:
            return self.execute_last(sql, *given, unsure=bool(claim.record_id))
        return bool(self.execute(sql, *given))

    def _compose_completion(self, ttl: timedelta | None, kept: timedelta | None) -> str:
        sql = self.sql["complete"]
        return sql.replace("[expires_at]", self.after(ttl)).replace("[purge_at]", self.after(kept))

    def insert_many(self, responses: Sequence[tuple[Claim, StoredPayload]]) -> None:
        """Store the responses of claims that have no rows."""
        rows = [self.insertion(claim, response) for claim, response in responses]
        all_values = ", ".join(f"({values})" for _, values, _ in rows)
        all_given = (parameter for _, _, given in rows for parameter in given)
        self.execute(f"{rows[0][0]} VALUES {all_values}", *all_given)

    # Late owners and steps.

    def fence(self, claim: Claim) -> bool:
        """Lock the claim's row, at the end of a transaction; ``False``: it is not its owner's."""
        return self.execute_last(self.sql["fence"], claim.record_id, claim.token)

    def save_step(self, claim: Claim, step: Step) -> bool:
        """Lock the claim's row likewise, and add a step to it, which is in the codec's form."""
        given = (step.name, step.attempt, step.result)
        return self.execute_last(self.sql["save_step"], *given, claim.record_id, claim.token)

    # What its errors say.

    def fault(self, error: BaseException) -> Fault | None:
        """What a database error says; ``None``: it is none, or one of the statement's own."""
        if not isinstance(error, DatabaseError | InterfaceError):
            return None
        if self.is_taken(error):
            return Fault.TAKEN
        lost = Fault.UNREACHABLE if isinstance(error, OperationalError | InterfaceError) else None
        return self.faults.get(self.code(error.__cause__), lost)

    def is_busy(self, error: BaseException) -> bool:
        """Whether a database error is a conflict with another transaction, not a fault."""
        return self.fault(error) is Fault.BUSY

    def is_taken(self, error: BaseException) -> bool:
        """Whether a database error says that the key has got a row from another transaction."""
        return isinstance(error, IntegrityError) and self.taken in str(error)

    @abstractmethod
    def code(self, error: BaseException | None) -> object:
        """The driver's code of an error."""
