"""Signs of life of the processes that run until they are stopped, for ``idempotency_status``."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any, Final

from django.db import Error as DatabaseFault

from ...models import DatabaseNow
from .databases import close_lost_connections, database
from .models import RunningProcess

INTERVAL: Final = 10.0
"""Seconds between two beats of a process."""
SILENCE: Final = timedelta(minutes=1)
"""A process whose last beat is older than that hangs, has died, or cannot reach the database."""


class Beat:
    """The sign of life of one process: a row, which is deleted when the process ends in good order.

    A process that begins takes the places of those with its name that have died before.

    Args:
        name: what runs, in an operator's words; the same after a restart.
    """

    def __init__(self, name: str) -> None:
        self._name = name[:255]
        self._pk: int | None = None
        self._since: datetime | None = None
        self._due = 0.0  # by time.monotonic()

    def beat(self) -> None:
        """Say that the process is alive, unless it said so a moment ago."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + INTERVAL
        with suppress(DatabaseFault):  # the next one may succeed
            close_lost_connections()
            self._write()

    def end(self) -> None:
        """Say that the process has ended in good order."""
        for _ in range(2 if self._pk else 0):  # the connection may have been lost since
            with suppress(DatabaseFault):
                close_lost_connections()
                self._rows().filter(pk=self._pk).delete()
                return

    def _write(self) -> None:
        rows, now = self._rows(), DatabaseNow()
        if self._pk is None or not rows.filter(pk=self._pk).update(beat_at=now):
            process = f"{socket.gethostname()[:200]}, process {os.getpid()}"
            row = rows.create(name=self._name, process=process, started_at=now, beat_at=now)
            since = rows.values_list("started_at", flat=True).get(pk=row.pk)
            self._pk, self._since = row.pk, since  # together: the connection may be lost in between
        replaced = rows.filter(name=self._name, beat_at__lt=self._since)
        replaced.filter(beat_at__lt=now - SILENCE).delete()

    def _rows(self) -> Any:
        return RunningProcess.objects.using(database())
