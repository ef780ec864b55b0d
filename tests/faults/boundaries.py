"""The points between two statements of a process, numbered, and what is to happen at one."""

from __future__ import annotations

import os
import signal
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

MAIN = "main"
HEARTBEAT = "heartbeat"


@dataclass(frozen=True)
class Strike:
    """Kill the process when a thread of it passes its boundary of that number.

    ``whole``: not only this process, but the group of processes that it belongs to.
    """

    number: int
    thread: str = MAIN
    whole: bool = False


def renewal(passed: Sequence[str]) -> int | None:
    """How many boundaries a heartbeat has passed when it has renewed a lease; ``None``: not yet.

    It is one statement, which commits by itself.
    """
    renewed = (count for count, what in enumerate(passed, 1) if what.startswith("after UPDATE"))
    return next(renewed, None)


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
        self.pass_(f"before {what}")
        yield
        self.pass_(f"after {what}")

    def wait_for_renewal(self, timeout: float) -> None:
        """Return when the heartbeat has renewed a lease.

        Raises:
            TimeoutError: it did not.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: renewal(self.passed[HEARTBEAT]), timeout):
                raise TimeoutError(f"No lease was renewed: {self.passed[HEARTBEAT]}")

    def pass_(self, what: str) -> None:
        """A boundary."""
        name = threading.current_thread().name
        thread = HEARTBEAT if name.startswith("idempotency-heartbeat") else MAIN
        with self._changed:
            passed = self.passed[thread]
            strike = self.strike
            if strike and (strike.thread, strike.number) == (thread, len(passed)):
                if strike.whole:
                    os.killpg(0, signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
            passed.append(what)
            self._changed.notify_all()


boundaries = Boundaries()
"""Those of this process. A process that is to be struck executes one operation only."""
