"""Streams: messages that are numbered in order, such as those of a Kafka partition.

::

    with claim_stream("billing/orders/0") as stream:
        consumer.seek(TopicPartition("orders", 0, stream.position + 1))
        for message in consumer:
            if stream.is_new(message.offset()):
                with stream.advance(to=message.offset()):
                    book(message.value())

The position is raised in the transaction of the effects. So the effects of each offset commit once,
whatever the broker believes to be acknowledged, and an owner that lost the stream commits nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Self

from django.db import Error as DatabaseFault
from django.db import OperationalError, connections, transaction
from django.db.models import F

from ..concurrency.rollbacks import on_rollback, refuse_marked
from ..errors import AlreadyProcessed, StreamFenced
from ..policy import scopes
from ..stores.database.transactions import forbid_atomic_block, without_autocommit
from . import positions
from .databases import database


class Stream:
    """A stream that this process has claimed, until somebody else claims it. For one thread.

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
        that nobody can claim the stream between the effects and their commit. If the block raises,
        its effects and the position are rolled back. Within a transaction that is open on the
        database, it is a savepoint of that one, and commits with it.

        Args:
            to: the offset of the message, or of the last one if the block handles several. Any
                offset after the position will do, because a compacted log has holes.

        Raises:
            AlreadyProcessed: the position is there already. The block does not run.
            StreamFenced: somebody else has claimed the stream, or an operator has reset it. The
                block does not run. Stop reading the stream, or claim it again.
            ValueError: it is no offset; the stream is closed.
            ImproperlyConfigured: autocommit is off on the database, so that the end of the block
                would commit nothing.
            TransactionManagementError: the transaction was marked for rollback in the block.
            OperationalError: the database's own, for example because of a conflict. Where it is
                raised at the COMMIT, only the database knows whether it was done: claim again.
        """
        self._refuse_unfit(to)
        self._refuse_autocommit(to)
        begun, alone = False, not connections[self._using].in_atomic_block
        try:
            with transaction.atomic(using=self._using):
                self._take(to, alone=alone)
                begun = True
                yield
                refuse_marked(self._using, f"The block that advances {self.name!r} to {to}")
        except OperationalError as error:
            if not begun:
                self._refuse_fenced(error)
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
        if positions.advance(self._using, self._row, epoch, to, positions.OWNED, *given):
            return
        row = positions.locked(self._using, self._row)
        if row is None or row.epoch != self.epoch:
            raise self._fenced()
        if alone:
            self.position = max(self.position, row.position)  # a COMMIT that was not confirmed
        raise AlreadyProcessed(
            f"The offset {to} of the stream {self.name!r} was processed before: its position is "
            f"{row.position}. Skip the message. Ask stream.is_new(offset) first, which costs "
            "nothing."
        )

    def _refuse_fenced(self, error: OperationalError) -> None:
        """Raise ``StreamFenced`` if that is what the conflict with another transaction was."""
        if connections[self._using].in_atomic_block:
            return  # which is of no use any more; the next attempt finds out
        epochs: list[int] = []
        with suppress(DatabaseFault):
            epochs += positions.rows(self._using, self._row).values_list("epoch", flat=True)
        if epochs not in ([], [self.epoch]):
            raise self._fenced() from error

    def _fenced(self) -> StreamFenced:
        return StreamFenced(
            f"The stream {self.name!r} was claimed by somebody else, or reset by an operator, "
            f"after this process claimed it as epoch {self.epoch}. Nothing was executed. Stop "
            "reading it, or call claim_stream() again and go on after its position."
        )

    def _go_back(self, position: int) -> None:
        self.position = min(self.position, position)

    def _refuse_autocommit(self, to: int) -> None:
        connection = connections[self._using]
        if not (connection.in_atomic_block or connection.get_autocommit()):
            what = f"What advances {self.name!r} to {to}"
            raise without_autocommit(self._using, what)

    def _refuse_unfit(self, to: int) -> None:
        if self._closed:
            raise ValueError(
                f"The stream {self.name!r} is closed. Call claim_stream() to own it again."
            )
        positions.refuse_unfit("offset", to)


def claim_stream(name: str, *, using: str | None = None) -> Stream:
    """Own the stream from now on; whoever owned it before is fenced.

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
    _refuse_peer(name)
    forbid_atomic_block(using, f"The claim of the stream {name!r}")
    row = positions.change(using, scopes.fit(name), epoch=F("epoch") + 1)
    return Stream(name, using, row.epoch, row.position)


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
    _refuse_peer(name)
    positions.refuse_unfit("position", position, least=-1)
    row = scopes.fit(name)
    positions.change(using or database(), row, epoch=F("epoch") + 1, position=position)


def _refuse_peer(name: str) -> None:
    if name.startswith(positions.PEER):
        raise ValueError(
            f"A stream cannot be called {name!r}: names that begin with {positions.PEER!r} belong "
            "to the peers of accept(). Give it another name."
        )
