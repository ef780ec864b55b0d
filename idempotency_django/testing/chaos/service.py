"""Somebody else's service, whose effects can be counted from every process."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from uuid import uuid4
from weakref import finalize

from .boundaries import CALL, before

_TABLE = "CREATE TABLE done (number INTEGER PRIMARY KEY, reference TEXT, key TEXT UNIQUE)"
_PATIENCE = 60.0  # seconds


class Service:
    """Stands for a service outside of the database, such as a payment provider. ::

        provider = Service("provider")

        def charge(order, execution):
            return provider.call(order.reference, key=execution.derive_key("charge"))

        provider.effects("order-17")  # 1

    It does something once per key, as such services promise; without a key, at each call. What it
    has done outlives the process that called it. Before a call, :func:`chaos` can kill and pause
    the process; it can also lose the answer.

    Args:
        name: for the report.
    """

    def __init__(self, name: str = "service") -> None:
        self.name = name
        folder = tempfile.mkdtemp(prefix="idempotency-service-")
        finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._path = Path(folder, "done.sqlite3")
        with self._opened() as database:
            database.execute(_TABLE)

    def call(self, reference: object, *, key: str = "") -> str:
        """Do something, unless it was done under this key.

        Args:
            reference: what it is done for: the order, the message.
            key: the caller's idempotency key.

        Returns:
            What names it, such as ``"provider-1"``: the same for each call with a key.

        Raises:
            TimeoutError: it is done, but the answer is lost.
        """
        lost = before(CALL + self.name)
        key = key or uuid4().hex
        with self._opened() as database:
            database.execute(
                "INSERT OR IGNORE INTO done (reference, key) VALUES (?, ?)", [str(reference), key]
            )
            [number] = database.execute("SELECT number FROM done WHERE key = ?", [key]).fetchone()
        if lost:
            raise TimeoutError(f"{self.name} did not answer.")
        return f"{self.name}-{number}"

    def effects(self, reference: object) -> int:
        """How often it was done for this reference."""
        query = "SELECT count(*) FROM done WHERE reference = ?"
        with self._opened() as database:
            [count] = database.execute(query, [str(reference)]).fetchone()
        return int(count)

    def forget(self) -> None:
        """Forget all that was done, as a database of tests does between two of them."""
        with self._opened() as database:
            database.execute("DELETE FROM done")

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._path, timeout=_PATIENCE)) as database:
            database.execute("PRAGMA synchronous = OFF")
            with database:
                yield database
