"""Which history a database is on, so that nothing is replayed that a fail-over has undone."""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext
from typing import Final

from django.db import Error as DatabaseFault
from django.db import connections, transaction

logger = logging.getLogger("idempotency_django")

QUESTIONS: Final = {
    # The timeline of what is being written now: a promotion begins a new one at once, where
    # pg_control_checkpoint() tells of the old one until the next checkpoint.
    "postgresql": (
        "SELECT concat_ws('/', system_identifier, current_database(), CASE WHEN "
        "pg_is_in_recovery() THEN 'recovery' ELSE "
        "substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) END) FROM pg_control_system()"
    ),
    # MariaDB and MySQL number no timelines; a fail-over is at least to another server.
    "mysql": "SELECT CONCAT_WS('/', @@hostname, @@port, @@server_id, DATABASE())",
}
"""By vendor: one text that changes when another server takes over. SQLite has no other server."""


class Timeline:
    """The history that a database is on, as far as this process knows.

    One object serves all threads. It asks rarely, so it may be out of date. That is safe, because a
    timeline that has ended never comes back.

    Args:
        using: the database, by its alias in ``DATABASES``.
        recheck: how long the database's reply is used, in seconds; ``None``: never ask, every
            history counts as the same.
    """

    def __init__(self, using: str, recheck: float | None) -> None:
        self._using = using
        self._recheck = recheck
        self._known: tuple[str, float] | None = None

    def current(self) -> str | None:
        """What it is now, asked no longer ago than ``recheck``; ``None``: unknown."""
        known = self._known
        if self._recheck is None:
            return ""
        if known is None or time.monotonic() - known[1] >= self._recheck:
            return self._ask()
        return known[0]

    def latest(self, *, ask: bool) -> str | None:
        """What it was when this process last asked.

        ``None``: it does not know, and may not ``ask`` now or gets no answer.
        """
        known = self._known
        if known is not None:
            return known[0]
        return self.current() if ask or self._recheck is None else None

    def forget(self) -> None:
        """Ask at the next use: the database was away, so it may be another one now."""
        self._known = None

    def _ask(self) -> str | None:
        connection, asked_at = connections[self._using], time.monotonic()
        question = QUESTIONS.get(connection.vendor)
        if question is None:
            self._known = "", float("inf")
            return ""
        self._known = None
        within = connection.in_atomic_block  # which a failure here must not spoil
        try:
            with (
                transaction.atomic(using=self._using) if within else nullcontext(),
                connection.cursor() as cursor,
            ):
                cursor.execute(question)
                timeline = str(cursor.fetchone()[0])
        except DatabaseFault:
            logger.warning(
                "The database %r does not say which timeline it is on, so cached answers are not "
                "used. If its user may not ask, grant it pg_control_system(). Or set the store's "
                "recheck to None: cached answers may then outlive a fail-over.",
                self._using,
                exc_info=True,
            )
            if not within:
                connection.close_if_unusable_or_obsolete()
            return None
        self._known = timeline, asked_at
        return timeline
