"""Streams: messages that are numbered in order, such as those of a Kafka partition.

::

    with claim_stream("billing/orders/0") as stream:
        consumer.seek(TopicPartition("orders", 0, stream.position + 1))
        for message in consumer:
            if stream.is_new(message.offset()):
                with stream.advance(to=message.offset()):
                    book(message.value())

The position is raised in the transaction of the effects. So the effects of each offset commit once,
even if the broker believes otherwise, and an owner that lost the stream commits nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from types import TracebackType
from typing import Final, Self

from django.core.exceptions import ImproperlyConfigured
from django.db import Error as DatabaseFault
from django.db import OperationalError, connections, transaction
from django.db.models import F, QuerySet
from django.db.models.expressions import Combinable

from ...models import DatabaseNow
from ...policy import scopes
from ...stores import DIALECTS, execute_first, forbid_atomic_block, stores, without_autocommit
from ..concurrency.locks import on_rollback, refuse_marked
from .databases import database
from .errors import AlreadyProcessed, StreamFenced
from .models import StreamPosition

PEER: Final = "peer:"
"""The prefix of the names of peers in the table, which those of streams do not have."""

LARGEST: Final = 2**63 - 1
"""The largest number that the columns hold."""

_RETRY_SECONDS: Final = 10
"""Seconds during which a change that conflicts with another transaction is retried."""

# The conditions of the one UPDATE.
_OWNED: Final = "{epoch} = %s AND {position} < %s"
_NEXT: Final = "{epoch} = %s AND {position} = %s"
_FIRST: Final = "({epoch} = %s AND {position} = -1) OR {epoch} < %s"
_CONTINUED: Final = "{epoch} <= %s AND {position} = %s"


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
        ValueError: it is the name of a peer.
        OperationalError: the owner before is in the middle of a message for longer than the
            database waits for a lock.
    """
    using = using or database()
    _validate_name(name)
    forbid_atomic_block(using, f"The claim of the stream {name!r}")
    row = change(using, scopes.fit(name), epoch=F("epoch") + 1)
    return Stream(name, using, row.epoch, row.position)


class Stream:
    """A stream that this process has claimed, until another process claims it. For one thread.

    :func:`claim_stream` makes it. At the end of a ``with`` block it is closed.

    Attributes:
        name: as it was claimed.
        epoch: the number of the claim: one more than that of the owner before.
        position: the offset of the last message whose effects are committed; -1: none yet.
    """

    def __init__(self, name: str, using: str, epoch: int, position: int) -> None:
        self.name = name
        self.epoch = epoch
        self.position = position
        self._using = using
        self._row = scopes.fit(name)
        self._closed = False

    def __repr__(self) -> str:
        return f"<Stream {self.name!r}, epoch {self.epoch}, at {self.position}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Advance no more, for example because the partition was revoked. It asks no database."""
        self._closed = True

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
        raises, its effects and the position are rolled back. Within a transaction that is open on
        the database, it is a savepoint of that one, and commits with it.

        Args:
            to: the offset of the message, or of the last one if the block handles several. Any
                offset after the position will do, because a compacted log has holes.

        Raises:
            AlreadyProcessed: the position was reached before. The block does not run.
            StreamFenced: another process has claimed the stream, or an operator has reset it. The
                block does not run. Stop reading the stream, or claim it again.
            ValueError: it is no offset; the stream is closed.
            ImproperlyConfigured: autocommit is off on the database, so that the end of the block
                would commit nothing.
            TransactionManagementError: the transaction was marked for rollback in the block.
            OperationalError: the database's own, for example because of a conflict. Where it is
                raised at the COMMIT, only the database knows whether it was done: claim again.
        """
        if self._closed:
            raise ValueError(
                f"The stream {self.name!r} is closed. Call claim_stream() to own it again."
            )
        _validate_number("offset", to)
        connection = connections[self._using]
        begun, alone = False, not connection.in_atomic_block
        if alone and not connection.get_autocommit():
            what = f"What advances {self.name!r} to {to}"
            raise without_autocommit(self._using, what)
        try:
            with transaction.atomic(using=self._using):
                self._take(to, alone=alone)
                begun = True
                yield
                refuse_marked(self._using, f"The block that advances {self.name!r} to {to}")
        except OperationalError as error:
            if not begun:
                self._raise_if_fenced(error)
            raise
        on_rollback(self._using, partial(self._go_back, self.position))
        self.position = to

    def _take(self, to: int, *, alone: bool) -> None:
        """Raise the position in the table, which locks the row, or say why not.

        Args:
            to: the position.
            alone: whether no transaction was open before, which could have raised it as well.
        """
        epoch, given = self.epoch, (self.epoch, to)
        if _move(self._using, self._row, epoch, to, _OWNED, *given):
            return
        row = _locked(self._using, self._row)
        if row is None or row.epoch != self.epoch:
            raise self._fenced()
        if alone:
            self.position = max(self.position, row.position)  # a COMMIT that was not confirmed
        raise AlreadyProcessed(
            f"The offset {to} of the stream {self.name!r} was processed before: its position is "
            f"{row.position}. Skip the message. Call stream.is_new(offset) first; it needs no "
            "query."
        )

    def _raise_if_fenced(self, error: OperationalError) -> None:
        """Raise ``StreamFenced`` if that is what the conflict with another transaction was."""
        if connections[self._using].in_atomic_block:
            return  # it is unusable now; the next attempt notices that
        epochs: list[int] = []
        with suppress(DatabaseFault):
            epochs += _rows(self._using, self._row).values_list("epoch", flat=True)
        if epochs not in ([], [self.epoch]):
            raise self._fenced() from error

    def _fenced(self) -> StreamFenced:
        return StreamFenced(
            f"The stream {self.name!r} was claimed by another process, or reset by an operator, "
            f"after this process claimed it as epoch {self.epoch}. Nothing was executed. Stop "
            "reading it, or call claim_stream() again and continue after its position."
        )

    def _go_back(self, position: int) -> None:
        self.position = min(self.position, position)


def reset_stream(name: str, *, position: int, using: str | None = None) -> None:
    """Set the position by hand, forth or back, and fence the owner, which must claim again.

    Back, what comes after the position is executed again when it is delivered again.

    Args:
        name: the stream's; it need not be there yet.
        position: the offset of the last message that counts as processed; -1: none.
        using: as for :func:`claim_stream`.

    Raises:
        ValueError: it is the name of a peer, or no position.
    """
    _validate_name(name)
    _validate_number("position", position, least=-1)
    row = scopes.fit(name)
    change(using or database(), row, epoch=F("epoch") + 1, position=position)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The message is the next one. What the transaction does about it commits with its number."""


@dataclass(frozen=True, slots=True)
class Duplicate:
    """The message was accepted before. Do nothing, and acknowledge it.

    Attributes:
        position: the last number that was accepted.
    """

    position: int


@dataclass(frozen=True, slots=True)
class OutOfOrder:
    """Messages before this one are missing. Do nothing, and do not acknowledge it.

    Attributes:
        expected: the number of the next message.
    """

    expected: int


@dataclass(frozen=True, slots=True)
class Fenced:
    """A later incarnation of the peer has sent messages since. Refuse this one for good.

    Attributes:
        epoch: the epoch of the later one.
    """

    epoch: int


Acceptance = Accepted | Duplicate | OutOfOrder | Fenced


def accept(
    peer: str, *, epoch: int, sequence: int, continued: bool = False, using: str | None = None
) -> Acceptance:
    """Take the next message of a peer, in the transaction that is open.

    It is one UPDATE, which locks the peer's row until the transaction ends: simultaneous messages
    of one peer come one after the other. What is not accepted takes a SELECT more, and changes
    nothing. If the transaction is rolled back, the message was not accepted.

    Args:
        peer: who sent the message, as the transport has authenticated them, and to whom: each
            receiver has a name of its own for it. It must not be what the message itself says.
        epoch: which incarnation of the peer, 0 or more. One that restarts raises it, so that what
            the old one still has on its way is fenced.
        sequence: the number of the message, 0 or more, each one more than the one before.
        continued: whether a new epoch goes on with the numbers of the one before. By default it
            begins at 0 again, as Kafka's do.
        using: the database that the effects are written to; by default
            ``IDEMPOTENCY["MESSAGING_DATABASE"]``.

    Returns:
        :class:`Accepted`, :class:`Duplicate`, :class:`OutOfOrder` or :class:`Fenced`.

    Raises:
        ImproperlyConfigured: no transaction is open, so nothing could commit together.
        ValueError: the epoch or the number cannot be one.
        OperationalError: the database's own, for example because of a conflict; the transaction is
            of no use any more. Roll back, and take the message again.
    """
    using, row = using or database(), scopes.fit(PEER + peer)
    if not connections[using].in_atomic_block:
        raise ImproperlyConfigured(
            f"accept() was called for the peer {peer!r} without a transaction on the database "
            f"{using!r}, so its number would not commit together with its effects. Call accept() "
            "and write the effects within one transaction.atomic()."
        )
    _validate_number("epoch", epoch)
    _validate_number("sequence", sequence)
    before = (epoch, sequence - 1)
    if continued:
        condition, values = _CONTINUED, before
    else:
        condition, values = (_NEXT, before) if sequence else (_FIRST, (epoch, epoch))
    if _move(using, row, epoch, sequence, condition, *values):
        return Accepted()
    last = _locked(using, row)
    if last is None and sequence == 0:
        _create(using, row, epoch=epoch)  # or another transaction has by now
        if _move(using, row, epoch, sequence, condition, *values):
            return Accepted()
        last = _locked(using, row)
    return OutOfOrder(0) if last is None else _refused(last, epoch, sequence, continued=continued)


def reset_peer(peer: str, *, epoch: int, position: int, using: str | None = None) -> None:
    """Set by hand what was accepted of a peer, for example of one whose messages came elsewhere.

    Args:
        peer: as for :func:`accept`; it need not be there yet.
        epoch: the peer's epoch; what it sends under a lower one is fenced.
        position: the last number that counts as accepted; -1: none.
        using: as for :func:`accept`.

    Raises:
        ValueError: the epoch or the position cannot be one.
    """
    _validate_number("epoch", epoch)
    _validate_number("position", position, least=-1)
    row = scopes.fit(PEER + peer)
    change(using or database(), row, epoch=epoch, position=position)


def _refused(last: StreamPosition, epoch: int, sequence: int, *, continued: bool) -> Acceptance:
    """The reason why a message is not the next one after the last accepted message."""
    if epoch < last.epoch:
        return Fenced(last.epoch)
    if epoch > last.epoch and not continued:
        return OutOfOrder(0)
    if sequence <= last.position:
        return Duplicate(last.position)
    return OutOfOrder(last.position + 1)


def _validate_name(name: str) -> None:
    if name.startswith(PEER):
        raise ValueError(
            f"{name!r} is not a valid name of a stream: names with the prefix {PEER!r} belong to "
            "the peers of accept(). Rename it."
        )


def _validate_number(what: str, number: int, *, least: int = 0) -> None:
    """Raise ``ValueError`` if that cannot be an offset, a position, an epoch or a sequence."""
    if not isinstance(number, int) or not least <= number <= LARGEST:
        raise ValueError(
            f"{number!r} is not a valid {what}. It must be an integer from {least} to {LARGEST}."
        )


def _move(using: str, stream: str, epoch: int, position: int, condition: str, *values: int) -> bool:
    """Move the row, and lock it until the transaction's end; ``False``: it does not qualify.

    Args:
        using: the database, with an open transaction.
        stream: the row's.
        epoch: its epoch from now on.
        position: its position from now on.
        condition: one of this module's, of what the row must be like.
        values: the parameters of the condition.
    """
    connection, statement = connections[using], _move_statement(using, condition)
    with connection.cursor() as cursor:
        combine = all(getattr(s, "combine_statements", True) for s in stores.all())
        execute_first(connection, cursor, statement, (epoch, position, stream, *values), combine)
        return bool(cursor.rowcount)


@cache
def _move_statement(using: str, condition: str) -> str:
    quote = connections[using].ops.quote_name
    columns = {f.name: quote(str(f.column)) for f in StreamPosition._meta.concrete_fields}
    now, _ = _rows(using, "").query.get_compiler(using).compile(DatabaseNow())
    return (
        f"UPDATE {quote(StreamPosition._meta.db_table)} SET {columns['epoch']} = %s, "
        f"{columns['position']} = %s, {columns['updated_at']} = {now} "
        f"WHERE {columns['stream']} = %s AND ({condition.format(**columns)})"
    )


def _rows(using: str, stream: str) -> QuerySet[StreamPosition]:
    """The row of the stream, or no row."""
    return StreamPosition._base_manager.using(using).filter(stream=stream)


def _locked(using: str, stream: str) -> StreamPosition | None:
    """The row as it is now, and not as the transaction began with it; locked until its end."""
    return _rows(using, stream).select_for_update().first()


def _create(using: str, stream: str, *, epoch: int = 0) -> None:
    """Create the row of an unprocessed stream unless it exists; locked.

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
            over = connection.in_atomic_block or time.monotonic() - started > _RETRY_SECONDS
            if over or not dialect.is_busy(error):
                raise


def _changed(using: str, stream: str, values: dict[str, int | Combinable]) -> StreamPosition:
    row, changes = _rows(using, stream), {**values, "updated_at": DatabaseNow()}
    if not row.update(**changes):
        _create(using, stream)
        row.update(**changes)
    return row.get()
