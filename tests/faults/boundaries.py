"""The points between two statements of a process, numbered, and what is to happen at one."""

from __future__ import annotations

import os
import signal
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

MAIN = "main"
HEARTBEAT = "heartbeat"


@dataclass(frozen=True)
class Strike:
    """Send the process a signal when a thread of it passes its boundary of that number."""

    number: int
    thread: str = MAIN
    signal: int = signal.SIGKILL


class Boundaries:
    """What the threads of this process have passed, each in its order.

    A thread's own boundaries are the same ones at each run of the same operation; how those of two
    threads interleave is not.
    """

    def __init__(self) -> None:
        self.passed: defaultdict[str, list[str]] = defaultdict(list)
        self.strike: Strike | None = None
        self._changed = threading.Condition()

    @contextmanager
    def around(self, what: str) -> Iterator[None]:
        """A boundary before the block, and one after it unless it fails."""
        self._pass(f"before {what}")
        yield
        self._pass(f"after {what}")

    def wait_for(self, thread: str, what: str, timeout: float) -> None:
        """Return when that thread has passed that boundary.

        Raises:
            TimeoutError: it did not.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: what in self.passed[thread], timeout):
                raise TimeoutError(f"{thread} has not passed {what!r}.")

    def _pass(self, what: str) -> None:
        name = threading.current_thread().name
        thread = HEARTBEAT if name.startswith("idempotency-heartbeat") else MAIN
        with self._changed:
            passed = self.passed[thread]
            strike = self.strike
            if strike and (strike.thread, strike.number) == (thread, len(passed)):
                os.kill(os.getpid(), strike.signal)
            passed.append(what)
            self._changed.notify_all()


boundaries = Boundaries()
"""Those of this process. A process that is to be struck executes one operation only."""
