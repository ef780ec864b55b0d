"""The points at which a process can be struck: before whatever it sends to somebody else."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, Final
from unittest.mock import patch

from django.db import OperationalError, connections
from django.db.backends.utils import CursorWrapper

ACKNOWLEDGEMENT: Final = "the acknowledgement"
"""The last boundary: the handler has returned, and nobody knows it yet."""

CALL: Final = "the call of "
COMMIT: Final = "COMMIT"
"""The boundaries whose answer can be lost are those that begin with one of these."""

SHOWN: Final = 60  # characters of a statement
HEARTBEAT: Final = "idempotency-heartbeat"
"""How the names of the threads begin that renew leases, whenever they are due."""

_UNQUOTED: Final = str.maketrans("", "", '"`')
_SELECTED: Final = re.compile(r"\bSELECT .*? FROM\b")
_INSERTED: Final = re.compile(r"(\bINSERT\b.*?INTO \S+) ?\(.*")
_TRANSACTIONS: Final = {"_commit": COMMIT, "_rollback": "ROLLBACK"}


class Blow(StrEnum):
    """What happens to a process at a boundary."""

    KILL = "kill"
    PAUSE = "pause"
    LOSE = "lose"  # it is done, and the answer does not arrive


@dataclass(frozen=True)
class Strike:
    """A blow at the boundary of that number."""

    blow: Blow
    number: int


class Boundaries:
    """What this process has passed.

    Nothing can happen between what comes back from a server and what is sent next, so that there is
    one boundary between the two. A lease is renewed whenever it is due, so that counts as nothing.

    Args:
        strike: what is to happen, and at which boundary.
        tell: called with what a process comes to before it is killed or paused there.
    """

    def __init__(
        self, strike: Strike | None = None, tell: Callable[[str], object] | None = None
    ) -> None:
        self.passed: list[str] = []
        self._strike = strike
        self._tell = tell
        self._lock = threading.Lock()
        self._connecting = threading.local()

    def before(self, what: str) -> bool:
        """Pass the boundary before something; whether its answer is to be lost."""
        quiet = getattr(self._connecting, "now", False)
        if quiet or threading.current_thread().name.startswith(HEARTBEAT):
            return False
        with self._lock:
            number = len(self.passed)
            self.passed.append(what)
            if self._strike is None or self._strike.number != number:
                return False
            if self._tell is not None:
                self._tell(what)
            match self._strike.blow:
                case Blow.KILL:
                    os.kill(os.getpid(), signal.SIGKILL)
                case Blow.PAUSE:
                    os.kill(os.getpid(), signal.SIGSTOP)
            return self._strike.blow is Blow.LOSE

    @contextmanager
    def connecting(self) -> Iterator[None]:
        """The block connects to a database. What it executes to that end is no boundary."""
        self.before("CONNECT")
        self._connecting.now = True
        try:
            yield
        finally:
            self._connecting.now = False

    @contextmanager
    def observed(self) -> Iterator[None]:
        """In the block, whatever goes to a database passes a boundary first."""
        with ExitStack() as patches:

            def replace(owner: type, name: str, make: Callable[[Any], Any]) -> None:
                patches.enter_context(patch.object(owner, name, make(getattr(owner, name))))

            for name in ("_execute", "_executemany"):  # below all wrappers: what is really sent
                replace(CursorWrapper, name, self._executing)
            backends = {type(connection) for connection in connections.all()}
            # A class before the one that it inherits from, or it would inherit what is put there.
            for backend in sorted(backends, key=lambda backend: -len(backend.__mro__)):
                replace(backend, "connect", self._opening)
                for name, what in _TRANSACTIONS.items():
                    replace(backend, name, partial(self._ending, what))
            yield

    def _executing(self, execute: Callable[..., Any]) -> Callable[..., Any]:
        def executed(cursor: CursorWrapper, sql: Any, *arguments: Any) -> Any:
            self.before(shortened(sql))
            return execute(cursor, sql, *arguments)

        return executed

    def _opening(self, connect: Callable[[Any], None]) -> Callable[[Any], None]:
        def connected(connection: Any) -> None:
            with self.connecting():
                connect(connection)

        return connected

    def _ending(self, what: str, end: Callable[[Any], None]) -> Callable[[Any], None]:
        def ended(connection: Any) -> None:
            lost = self.before(what)
            end(connection)
            if lost:
                connection.connection.close()
                raise OperationalError(f"The connection was lost, so nobody knows of the {what}.")

        return ended


_active: Boundaries | None = None


@contextmanager
def active(boundaries: Boundaries) -> Iterator[None]:
    """In the block, :func:`crash_point` and services pass boundaries of these."""
    global _active  # noqa: PLW0603  # a process has one delivery at a time
    _active = boundaries
    try:
        yield
    finally:
        _active = None


def before(what: str) -> bool:
    """Pass a boundary, if there are any; whether the answer is to be lost."""
    return _active is not None and _active.before(what)


def crash_point(name: str) -> None:
    """Mark a point at which :func:`chaos` is to kill and pause the process; else it does nothing.

    Statements, commits and the calls of a :class:`Service` are such points already. Mark what a
    process does elsewhere: where it writes a file, or calls a service of its own.

    Args:
        name: what comes next, for the report, such as ``"the upload"``.
    """
    before(name)


def shortened(sql: object) -> str:
    """The statement on one line without its columns, as much of it as a report has room for."""
    line = " ".join(str(sql).translate(_UNQUOTED).split())
    line = _INSERTED.sub(r"\1 (…)", _SELECTED.sub("SELECT … FROM", line, count=1))
    return line if len(line) <= SHOWN else line[: SHOWN - 1] + "…"
