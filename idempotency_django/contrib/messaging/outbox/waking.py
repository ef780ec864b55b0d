"""Waking up relays when something is committed, on PostgreSQL; elsewhere they poll."""

from __future__ import annotations

import select
import threading
import time
from functools import partial
from typing import Any, Final

from django.db import Error as DatabaseFault
from django.db import connections, transaction

CHANNEL: Final = "idempotency_outbox"
INTERVAL: Final = 0.05
"""The shortest interval in seconds between two wake-ups by one process."""
MOMENT: Final = 0.5
"""Seconds between two checks of a listening relay for its stop signal."""

_last: dict[str, float] = {}


def wake_relays(using: str) -> None:
    """Send a ``NOTIFY`` after the commit.

    Within the transaction, PostgreSQL would take a lock that all such commits wait for. After it,
    losing the ``NOTIFY`` with the process costs no more than waiting for the next poll.
    """
    if connections[using].vendor == "postgresql":
        transaction.on_commit(partial(_notify, using), using=using, robust=True)


def _notify(using: str) -> None:
    now = time.monotonic()
    if now - _last.get(using, 0.0) < INTERVAL:
        return  # a relay that was woken up looks once more after the interval
    _last[using] = now
    with connections[using].cursor() as cursor:
        cursor.execute(f"NOTIFY {CHANNEL}")


class NotificationListener:
    """Waits for what :func:`wake_relays` sends, on PostgreSQL.

    Args:
        using: the alias of the database. The listener has a connection of its own to it.
        stop: ends each wait when it is set.
    """

    def __init__(self, using: str, stop: threading.Event) -> None:
        self._connection = connections[using].copy()
        self._stop = stop
        self._woken = False

    def wait(self, seconds: float) -> None:
        """Wait for so long at most, or until a relay is needed, or is to stop."""
        if self._woken:  # a process that was just heard sends nothing within the interval
            seconds = min(seconds, 2 * INTERVAL)
        ends = time.monotonic() + seconds
        self._woken = False
        while not (self._stop.is_set() or self._woken) and (left := ends - time.monotonic()) > 0:
            try:
                self._woken = self._heard(min(left, MOMENT))
            except DatabaseFault:
                self._connection.close()
                self._stop.wait(left)

    def close(self) -> None:
        """Leave the database."""
        self._connection.close()

    def _heard(self, seconds: float) -> bool:
        if self._connection.connection is None:
            with self._connection.cursor() as cursor:
                cursor.execute(f"LISTEN {CHANNEL}")
        driver: Any = self._connection.connection
        if callable(driver.notifies):  # psycopg 3; a list with psycopg2
            with self._connection.wrap_database_errors:
                return any(True for _ in driver.notifies(timeout=seconds, stop_after=1))
        readable, _, _ = select.select([driver], [], [], seconds)
        if readable:
            with self._connection.wrap_database_errors:
                driver.poll()
        heard = bool(driver.notifies)
        driver.notifies.clear()
        return heard
