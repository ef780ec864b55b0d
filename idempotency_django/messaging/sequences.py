"""Peers that number their messages: a repeated number is a no-op, a gap is refused.

::

    with transaction.atomic():
        match accept("peer-7", epoch=3, sequence=42):
            case Accepted():
                book(message)
            case Duplicate():
                pass                          # acknowledge it again
            case OutOfOrder(expected):
                ...                           # ask for that one first
            case Fenced():
                ...                           # an old incarnation of the peer: refuse it
"""

from __future__ import annotations

from dataclasses import dataclass

from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from ..policy import scopes
from . import positions
from .databases import database
from .models import StreamPosition


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
    using, row = using or database(), scopes.fit(positions.PEER + peer)
    _refuse_outside(using, peer)
    positions.refuse_unfit("epoch", epoch)
    positions.refuse_unfit("sequence", sequence)
    condition, values = _condition(epoch, sequence, continued=continued)
    if positions.advance(using, row, epoch, sequence, condition, *values):
        return Accepted()
    last = positions.locked(using, row)
    if last is None and sequence == 0:
        positions.create(using, row, epoch=epoch)  # or somebody else has by now
        if positions.advance(using, row, epoch, sequence, condition, *values):
            return Accepted()
        last = positions.locked(using, row)
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
    positions.refuse_unfit("epoch", epoch)
    positions.refuse_unfit("position", position, least=-1)
    row = scopes.fit(positions.PEER + peer)
    positions.change(using or database(), row, epoch=epoch, position=position)


def _condition(epoch: int, sequence: int, *, continued: bool) -> tuple[str, tuple[int, ...]]:
    """What the row must be like if the message is the next one."""
    if continued:
        return positions.CONTINUED, (epoch, sequence - 1)
    if sequence == 0:
        return positions.FIRST, (epoch, epoch)
    return positions.NEXT, (epoch, sequence - 1)


def _refused(last: StreamPosition, epoch: int, sequence: int, *, continued: bool) -> Acceptance:
    """Why a message is not the next one after what was accepted last."""
    if epoch < last.epoch:
        return Fenced(last.epoch)
    if epoch > last.epoch and not continued:
        return OutOfOrder(0)
    if sequence <= last.position:
        return Duplicate(last.position)
    return OutOfOrder(last.position + 1)


def _refuse_outside(using: str, peer: str) -> None:
    if not connections[using].in_atomic_block:
        raise ImproperlyConfigured(
            f"A message of the peer {peer!r} was to be accepted, but no transaction is open on the "
            f"database {using!r}, so its number would not commit together with its effects. Call "
            "accept() and make the effects within one transaction.atomic()."
        )
