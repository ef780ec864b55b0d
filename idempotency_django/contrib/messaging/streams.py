"""Streams: messages that are numbered in order, such as those of a Kafka partition.

::

    stream = claim_stream("billing/orders/0")
    consumer.seek(TopicPartition("orders", 0, stream.position + 1))
    for message in consumer:
        if stream.is_new(message.offset()):
            with stream.advance(to=message.offset()):
                book(message.value())

The position is raised in the transaction of the effects. So the effects of each offset commit once,
even if the broker believes otherwise, and an owner that lost the stream commits nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from django.db import connections, transaction
from django.db.models import F, QuerySet
from django.db.models.sql import UpdateQuery

from ...models import DatabaseNow
from ...policy import scopes
from ...stores import execute_first, forbid_atomic_block, stores
from ..concurrency.locks import refuse_marked
from .databases import database
from .errors import AlreadyProcessed, StreamFenced
from .models import StreamPosition

LARGEST: Final = 2**63 - 1
"""The largest number that the columns hold."""


def claim_stream(name: str, *, using: str | None = None) -> Stream:
    """Own the stream from now on; the owner before is fenced.

    Call it when the broker assigns the stream to this process. It raises the epoch, in a
    transaction of its own: two statements, one more the first time. If the owner before is in the
    middle of a message, it waits until that is committed or rolled back.

    Args:
        name: names the group of consumers as well as the stream, such as ``"billing/orders/0"``:
            each group has a position of its own.
        using: the database that the effects are written to; by default
            ``IDEMPOTENCY["MESSAGING_DATABASE"]``.

    Raises:
        ImproperlyConfigured: a transaction is open on the database: the old owner would be fenced
            only when that commits.
        OperationalError: the database's own, for example because the owner before is in the middle
            of a message for longer than the database waits for a lock.
    """
    using = using or database()
    forbid_atomic_block(using, f"The claim of the stream {name!r}")
    row = _rows(using, name)
    claimed = {"epoch": F("epoch") + 1, "updated_at": DatabaseNow()}
    with transaction.atomic(using=using):
        if not row.update(**claimed):
            _create(using, name)
            row.update(**claimed)
        found = row.get()
    return Stream(name, using, found.epoch, found.position)


@dataclass(slots=True)
class Stream:
    """A stream that this process has claimed, until another process claims it. For one thread.

    :func:`claim_stream` makes it.

    Attributes:
        name: as it was claimed.
        using: the database that its position is in.
        epoch: the number of the claim: one more than that of the owner before.
        position: the offset of the last message whose effects are committed; -1: none yet.
    """

    name: str
    using: str
    epoch: int
    position: int

    def is_new(self, offset: int) -> bool:
        """Whether the effects of this offset are still to be had. It asks no database.

        What was delivered again is not new: skip it.
        """
        return offset > self.position

    @contextmanager
    def advance(self, *, to: int) -> Iterator[None]:
        """Run the block in a transaction that also raises the position, or not at all.

        It is one UPDATE, before the block. It locks the stream's row until the transaction ends, so
        that no process can claim the stream between the effects and their commit. If the block
        raises, its effects and the position are rolled back.

        Args:
            to: the offset of the message, or of the last one if the block handles several. Any
                offset after the position will do, because a compacted log has holes.

        Raises:
            AlreadyProcessed: the position was reached before. The block does not run.
            StreamFenced: another process has claimed the stream, or an operator has reset it. The
                block does not run. Stop reading the stream, or claim it again.
            ValueError: it is no offset.
            ImproperlyConfigured: a transaction is open on the database, or autocommit is off, so
                that the end of the block would commit nothing.
            TransactionManagementError: the transaction was marked for rollback in the block.
            OperationalError: the database's own, for example because of a conflict. Where it is
                raised at the COMMIT, only the database knows whether it was done: claim again.
        """
        if not isinstance(to, int) or not 0 <= to <= LARGEST:
            raise ValueError(
                f"{to!r} is not a valid offset. It must be an integer from 0 to {LARGEST}."
            )
        forbid_atomic_block(self.using, f"What advances {self.name!r} to {to}")
        with transaction.atomic(using=self.using):
            row = _rows(self.using, self.name)
            if not _move(row.filter(epoch=self.epoch, position__lt=to), to):
                raise self._refusal(to, row.select_for_update().first())
            yield
            refuse_marked(self.using, f"The block that advances {self.name!r} to {to}")
        self.position = to

    def _refusal(self, to: int, row: StreamPosition | None) -> Exception:
        """Why the row does not move."""
        if row is None or row.epoch != self.epoch:
            return StreamFenced(
                f"The stream {self.name!r} was claimed by another process, or reset by an "
                f"operator, after this process claimed it as epoch {self.epoch}. Nothing was "
                "executed. Stop reading it, or call claim_stream() again and continue after its "
                "position."
            )
        self.position = max(self.position, row.position)  # a COMMIT that was not confirmed
        return AlreadyProcessed(
            f"The offset {to} of the stream {self.name!r} was processed before: its position is "
            f"{row.position}. Skip the message. Call stream.is_new(offset) first; it needs no "
            "query."
        )


def _move(expected: QuerySet[StreamPosition], position: int) -> bool:
    """Move the row, and lock it until the transaction's end; ``False``: it is not as expected."""
    query: Any = expected.query.chain(UpdateQuery)
    query.add_update_values({"position": position, "updated_at": DatabaseNow()})
    statement, parameters = query.get_compiler(expected.db).as_sql()
    connection = connections[expected.db]
    combine = all(getattr(store, "combine_statements", True) for store in stores.all())
    with connection.cursor() as cursor:
        execute_first(connection, cursor, statement, parameters, combine)
        return bool(cursor.rowcount)


def _rows(using: str, stream: str) -> QuerySet[StreamPosition]:
    """The row of the stream, or no row."""
    return StreamPosition._base_manager.using(using).filter(stream=scopes.fit(stream))


def _create(using: str, stream: str) -> None:
    """Create the row of an unprocessed stream unless it exists; locked.

    On MySQL and MariaDB, an INSERT that ignores the row takes a shared lock on it. Two that go on
    to update it would be a deadlock. One that updates it takes the exclusive lock.
    """
    row = StreamPosition(stream=scopes.fit(stream), updated_at=DatabaseNow())
    targets = connections[using].features.supports_update_conflicts_with_target
    StreamPosition._base_manager.using(using).bulk_create(
        [row],
        update_conflicts=True,
        update_fields=["stream"],
        unique_fields=["stream"] if targets else None,
    )
