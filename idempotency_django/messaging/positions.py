"""The rows of streams and peers: each function is one atomic step on one row.

The hot path is one UPDATE, whose SQL is composed once for each database: through the ORM, building
it would take longer than running it.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Final

from django.db import OperationalError, connections, transaction
from django.db.models import QuerySet
from django.db.models.expressions import Combinable

from ..models import DatabaseNow
from ..stores import stores
from ..stores.database.dialects import DIALECTS, CombinedMessages
from .models import StreamPosition

PEER: Final = "peer:"
"""What the names of peers begin with in the table, and those of streams do not."""

LARGEST: Final = 2**63 - 1
"""The largest number that the columns hold."""

PATIENCE: Final = 10
"""For so many seconds a change that met another transaction's is tried again."""

# The conditions of the one UPDATE.
OWNED: Final = "{epoch} = %s AND {position} < %s"
NEXT: Final = "{epoch} = %s AND {position} = %s"
FIRST: Final = "({epoch} = %s AND {position} = -1) OR {epoch} < %s"
CONTINUED: Final = "{epoch} <= %s AND {position} = %s"


def advance(
    using: str, stream: str, epoch: int, position: int, condition: str, *values: int
) -> bool:
    """Move the row, and lock it until the transaction's end; ``False``: it does not qualify.

    Args:
        using: the database, with an open transaction.
        stream: the row's.
        epoch: its epoch from now on.
        position: its position from now on.
        condition: one of this module's, of what the row must be like.
        values: the parameters of the condition.
    """
    with connections[using].cursor() as cursor, _beginning(using):
        cursor.execute(_advance(using, condition), (epoch, position, stream, *values))
        return bool(cursor.rowcount)


def _beginning(using: str) -> AbstractContextManager[None]:
    """What sends BEGIN with the first statement of a transaction, where stores do so, too."""
    if not DIALECTS[connections[using].vendor].combines:
        return nullcontext()
    if not all(getattr(s, "combine_statements", True) for s in stores.all() if s.using == using):
        return nullcontext()
    return CombinedMessages(connections[using], lambda _: False).beginning()


@cache
def _advance(using: str, condition: str) -> str:
    quote = connections[using].ops.quote_name
    columns = {f.name: quote(str(f.column)) for f in StreamPosition._meta.concrete_fields}
    now, _ = rows(using, "").query.get_compiler(using).compile(DatabaseNow())
    return (
        f"UPDATE {quote(StreamPosition._meta.db_table)} SET {columns['epoch']} = %s, "
        f"{columns['position']} = %s, {columns['updated_at']} = {now} "
        f"WHERE {columns['stream']} = %s AND ({condition.format(**columns)})"
    )


def rows(using: str, stream: str) -> QuerySet[StreamPosition]:
    """The one row of the stream, or none."""
    return StreamPosition._base_manager.using(using).filter(stream=stream)


def locked(using: str, stream: str) -> StreamPosition | None:
    """The row as it is now, and not as the transaction began with it; locked until its end."""
    return rows(using, stream).select_for_update().first()


def create(using: str, stream: str, *, epoch: int = 0) -> None:
    """Make the row of a stream of which nothing is processed, unless it is there; locked.

    On MySQL and MariaDB, an INSERT that ignores the row takes a shared lock on it. Two that go on
    to update it would be a deadlock. One that updates it takes the exclusive lock.
    """
    row = StreamPosition(stream=stream, epoch=epoch, updated_at=DatabaseNow())
    targets = connections[using].features.supports_update_conflicts_with_target
    StreamPosition._base_manager.using(using).bulk_create(
        [row],
        update_conflicts=True,
        update_fields=["stream"],
        unique_fields=["stream"] if targets else None,
    )


def change(using: str, stream: str, **values: int | Combinable) -> StreamPosition:
    """Set columns of the row, which is made if need be; the row after that.

    In a transaction of its own, it is tried again after a conflict with another one.

    Raises:
        OperationalError: the row stayed locked for longer than the database waits.
    """
    connection, started = connections[using], time.monotonic()
    dialect = DIALECTS[connection.vendor](using)
    while True:
        try:
            with transaction.atomic(using=using):
                return _changed(using, stream, values)
        except OperationalError as error:
            over = connection.in_atomic_block or time.monotonic() - started > PATIENCE
            if over or not dialect.is_busy(error):
                raise


def _changed(using: str, stream: str, values: dict[str, int | Combinable]) -> StreamPosition:
    row, changes = rows(using, stream), {**values, "updated_at": DatabaseNow()}
    if not row.update(**changes):
        create(using, stream)
        row.update(**changes)
    return row.get()


def refuse_unfit(what: str, number: int, *, least: int = 0) -> None:
    """Raise ``ValueError`` if that cannot be an offset, a position, an epoch or a sequence."""
    if not isinstance(number, int) or not least <= number <= LARGEST:
        raise ValueError(
            f"{number!r} cannot be the {what}. It must be a whole number from {least} to {LARGEST}."
        )
