"""What must hold of the transactions around an operation, and in it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from ..atomic_blocks import is_open
from .dialects import Dialect

logger = logging.getLogger("idempotency_django")


@contextmanager
def unbroken(dialect: Dialect, what: str) -> Iterator[None]:
    """Refuse the statements that would end the running transaction, and log where it has ended.

    What Django's cursors execute is looked at, and costs no statement. Scripts, stored procedures
    and the driver's own cursors are not seen.
    """

    def refuse(execute: Callable[..., Any], sql: Any, *arguments: Any) -> Any:
        text = dialect.text_of(sql)
        if dialect.ends_transaction(text):
            raise ImproperlyConfigured(
                f"{text[:40].strip()!r} would end the transaction that {what} runs in, so its "
                "effects and its answer would not commit together. Move the statement out of the "
                "view, or give the view's idempotency policy mode='leased'."
            )
        return execute(sql, *arguments)

    with connections[dialect.using].execute_wrapper(refuse):
        try:
            yield
        finally:
            if dialect.has_ended():
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
