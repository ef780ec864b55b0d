"""Deliveries in processes of their own, which can be killed and paused."""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from .boundaries import ACKNOWLEDGEMENT, Boundaries, Strike, active

LONGEST: Final = 60
"""Seconds after which a delivery is ended: it waits for something that does not come."""

_REFUSED: Final = 400  # HTTP statuses from here on acknowledge nothing


@dataclass
class Ended:
    """How a delivery ended.

    Attributes:
        error: why the message is not acknowledged; empty: it is.
        passed: what its boundaries were before.
        struck: before what it was struck; empty: it was not.
    """

    error: str = "its process did not say how it ended"
    passed: list[str] = field(default_factory=list)
    struck: str = ""

    @property
    def acknowledged(self) -> bool:
        """Whether the message need not be delivered again."""
        return not self.error


class Child:
    """A process that executes a function, whose connections to databases are its own.

    Args:
        call: the function.
        strike: what is to happen to the process.
    """

    def __init__(self, call: Callable[[], Any], strike: Strike | None = None) -> None:
        close_connections()
        self._reader, writer = os.pipe()
        with warnings.catch_warnings():
            # Python warns of threads. The heartbeats know about forks; others should not be there.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if self._pid == 0:
            _execute(call, strike, writer)
        os.close(writer)
        self._ended = Ended()
        self._over = False
        self._said = b""

    def wait(self) -> Ended:
        """How it ended, once it has."""
        while not self._over:
            self._read(None)
        return self._ended

    def wait_for(self, seconds: float) -> Ended | None:
        """How it ended; ``None``: it goes on for longer than that."""
        deadline = time.monotonic() + seconds
        while not self._over:
            if not self._read(max(0.0, deadline - time.monotonic())):
                return None
        return self._ended

    def wait_for_pause(self) -> bool:
        """Return when it is paused (``True``), or has ended before that."""
        while not (self._over or self._ended.struck):
            self._read(None)
        if not self._over:
            os.waitpid(self._pid, os.WUNTRACED)
        return not self._over

    def resume(self) -> None:
        """Let it go on."""
        os.kill(self._pid, signal.SIGCONT)

    def close(self) -> None:
        """Kill it, if it has not ended."""
        if not self._over:
            os.kill(self._pid, signal.SIGKILL)
            self.wait()

    def _read(self, seconds: float | None) -> bool:
        """Take in what it says next; ``False``: it said nothing for so long."""
        readable, _, _ = select.select([self._reader], [], [], seconds)
        if not readable:
            return False
        said = os.read(self._reader, 1 << 16)
        *lines, self._said = (self._said + said).split(b"\n")
        for line in lines:
            vars(self._ended).update(json.loads(line))
        if not said:
            self._over = True
            os.close(self._reader)
            _, status = os.waitpid(self._pid, 0)
            if os.WIFSIGNALED(status):
                self._ended.error = _killed(os.WTERMSIG(status))
        return True


def _execute(  # pragma: no cover  # only in processes that are not measured, and that are killed
    call: Callable[[], Any], strike: Strike | None, writer: int
) -> NoReturn:
    """What the new process does."""
    try:
        gc.freeze()  # what the parent has left for its collector is none of ours
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LONGEST)
        execute(call, strike, lambda **said: os.write(writer, json.dumps(said).encode() + b"\n"))
    except BaseException:  # noqa: BLE001  # it must not go on as a copy of its parent
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(0)


def execute(call: Callable[[], Any], strike: Strike | None, tell: Callable[..., object]) -> None:
    """Call the function, and say how that ended, in the words of :class:`Ended`."""
    boundaries = Boundaries(strike, lambda what: tell(struck=what))
    with active(boundaries), boundaries.observed():
        error = outcome(call)
        if not error:
            boundaries.before(ACKNOWLEDGEMENT)
    connections.close_all()
    tell(error=error, passed=boundaries.passed)


def outcome(call: Callable[[], Any]) -> str:
    """Call a function that delivers a message: why it is not acknowledged, or nothing."""
    try:
        returned = call()
    except Exception as error:  # noqa: BLE001  # whatever it is, the message is delivered again
        return f"{type(error).__name__}: {error}"
    status = getattr(returned, "status_code", 0)
    return f"HTTP {status}" if status >= _REFUSED else ""


def close_connections() -> None:
    """Leave the databases, so that a process that is made now has nothing of this one's."""
    connections.close_all()
    for connection in connections.all(initialized_only=True):
        if hasattr(connection, "close_pool"):
            connection.close_pool()


def refuse_unfit() -> None:
    """Refuse to work where processes cannot be made, or would not see what this one has written.

    Raises:
        ImproperlyConfigured: this is Windows; a transaction is open; or a database is in memory.
    """
    if not hasattr(os, "fork"):
        raise ImproperlyConfigured(
            "chaos() kills processes that it makes with os.fork(), which this system does not "
            "have. Run the test on Linux or macOS, and skip it elsewhere: "
            '@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork").'
        )
    for connection in connections.all():
        if connection.in_atomic_block:
            raise ImproperlyConfigured(
                f"A transaction is open on the database {connection.alias!r}, so nothing that the "
                "test has written is there for the processes that chaos() makes. Use a "
                "TransactionTestCase, or pytest.mark.django_db(transaction=True)."
            )
        if getattr(connection, "is_in_memory_db", bool)():
            raise ImproperlyConfigured(
                f"The database {connection.alias!r} is in the memory of this process, where the "
                "processes that chaos() makes do not see it. Give it a file for tests: "
                'DATABASES["default"]["TEST"] = {"NAME": BASE_DIR / "test.sqlite3"}.'
            )


def _killed(number: int) -> str:
    if number == signal.SIGALRM:
        return f"it took longer than {LONGEST} seconds"
    return f"its process ended with {signal.Signals(number).name}"
