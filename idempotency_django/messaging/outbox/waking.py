"""Waking up relays when something is committed, on PostgreSQL; elsewhere they poll."""

from __future__ import annotations

import time
from functools import partial
from typing import Final

from django.db import connections, transaction

CHANNEL: Final = "idempotency_outbox"
INTERVAL: Final = 0.05
"""Seconds in which a process wakes up the relays once at most."""

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
