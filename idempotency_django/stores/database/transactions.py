"""What must hold of the transactions around an operation, and in it."""

from __future__ import annotations

import logging
from typing import Final

from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from ..atomic_blocks import is_open

logger = logging.getLogger("idempotency_django")


REFUSED_MESSAGE: Final = (
    "The database could not commit because of a conflict with another transaction, and has "
    "rolled back. Retry later with the same key."
)


def statement_refused(statement: str, what: str) -> ImproperlyConfigured:
    """The error of a statement that would end the transaction that something runs in."""
    return ImproperlyConfigured(
        f"{statement[:40].strip()!r} would end the transaction that {what} runs in, so its "
        "effects and its answer would not commit together. Move the statement out of the "
        "view, or give the view's idempotency policy mode='leased'."
    )


def log_ended(what: str) -> None:
    """Tell that a transaction has ended unseen while something ran in it."""
    logger.error(
        "The transaction of %s ended while its view was running (executescript() "
        "commits, for example). Its effects so far are committed without its answer, "
        "and a crash or an error at this point leaves it interrupted. Move what "
        "commits out of the view, or give the view's idempotency policy "
        "mode='leased'.",
        what,
    )


_NO_AUTOCOMMIT: Final = (
    "{what} must be committed, but the database {using!r} is not in autocommit mode, so "
    "nothing is committed unless somebody calls commit(). Remove AUTOCOMMIT=False from DATABASES. "
    "After transaction.set_autocommit(False), call transaction.set_autocommit(True)."
)


def without_autocommit(
    using: str, what: str = "What an operation with an idempotency key does"
) -> ImproperlyConfigured:
    """The error of a database that commits nothing by itself."""
    return ImproperlyConfigured(_NO_AUTOCOMMIT.format(what=what, using=using))


def forbid_atomic_block(using: str, what: str) -> None:
    """Refuse a transaction around what must commit when it ends.

    Args:
        using: the database.
        what: what commits, for the error.

    Raises:
        ImproperlyConfigured: there is one, or the database is not in autocommit mode.
    """
    connection = connections[using]
    if not connection.in_atomic_block:
        if not connection.get_autocommit():
            raise without_autocommit(using, what)
    elif is_open(using):
        raise ImproperlyConfigured(
            f"{what} must commit by itself, but a transaction is open around it on the "
            f"database {using!r}. Is it a transaction.atomic()? Then move it inside. Is "
            "it ATOMIC_REQUESTS? Then mark the view with transaction.non_atomic_requests."
        )


def restore_autocommit(using: str, name: str, *, commit: bool) -> None:
    """End the transaction that a leased view left open by leaving autocommit off.

    Its answer is stored with it, so that neither is there without the other.

    Args:
        using: the database.
        name: the operation's.
        commit: whether to commit what the view has not; else it is rolled back.
    """
    logger.warning(
        "%s left autocommit off on the database %r. What it had not committed was %s. Use "
        "transaction.atomic() in it, or call set_autocommit(True) at its end.",
        name,
        using,
        "committed with its answer" if commit else "rolled back",
    )
    connection = connections[using]
    (connection.commit if commit else connection.rollback)()
    connection.set_autocommit(True)
