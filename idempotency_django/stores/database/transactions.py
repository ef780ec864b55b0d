"""What keeps the transaction of a claim whole while its handler runs in it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import connections

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
