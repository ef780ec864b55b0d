"""For tests: one request whose process is killed at a chosen moment, and its retry.

:mod:`~idempotency_django.testing.chaos` tries all moments.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Final, Literal, TypeVar, get_args

from .chaos import (
    ACKNOWLEDGEMENT,
    KILL,
    Child,
    Strike,
    end_waits,
    validate_databases,
    validate_fork,
)
from .writes import bookkeeping_tables, table_written

R = TypeVar("R")
At = Literal["before-effect", "after-effect", "after-commit"]

_ATTEMPTS: Final = 10
_PAUSE, _LONGEST_PAUSE = 0.01, 1.0  # seconds
_BUSY: Final = (409, 503)


@dataclass(frozen=True)
class _Crash(Strike):
    at: str = ""
    ignored: frozenset[str] = frozenset()

    def hits(self, passed: Sequence[str], what: str) -> bool:
        if self.at == "after-commit":
            return what == ACKNOWLEDGEMENT
        return any(map(self._writes, passed if self.at == "after-effect" else [what]))

    def _writes(self, what: str) -> bool:
        table = table_written(what)
        return table is not None and table not in self.ignored


def crash(send: Callable[[], R], at: At = "after-effect") -> R:
    """Send a request whose process is killed, then send it again until the key is free. ::

        response = crash(send, at="after-effect")
        assert response.status_code == 201
        assert Charge.objects.count() == 1

    The first ``send()`` runs in a process of its own, which gets SIGKILL:

    ``"before-effect"``
        before its first write.
    ``"after-effect"``
        after its first write, before the next statement or COMMIT.
    ``"after-commit"``
        when the response is ready, but not sent.

    Leases have ended for the retry.

    Args:
        send: sends the request with a key, and returns the response.
        at: the moment.

    Returns:
        The response to the retry. While it is 409 or 503, the request is sent again, ten times at
        most.

    Raises:
        AssertionError: the process was not killed, because it made no write.
        ImproperlyConfigured: a transaction is open, a database is in memory, or the system has no
            ``os.fork()``.
        ValueError: there is no such moment.
    """
    if at not in get_args(At):
        raise ValueError(f"There is no moment {at!r}. Choose from {', '.join(get_args(At))}.")
    validate_fork("crash()")
    validate_databases("the processes of crash()")
    with closing(Child(send, _Crash(KILL, at=at, ignored=bookkeeping_tables()))) as child:
        child.wait()
    if not child.ended.struck:
        ending = child.ended.error or "it ended without a write to your tables"
        raise AssertionError(f"The process was not killed at {at!r}: {ending}.")
    pause = _PAUSE
    for _ in range(_ATTEMPTS):
        end_waits()
        response = send()
        if getattr(response, "status_code", 0) not in _BUSY:
            break
        time.sleep(pause)  # the server may not have noticed yet that the process is dead
        pause = min(pause * 2, _LONGEST_PAUSE)
    return response
