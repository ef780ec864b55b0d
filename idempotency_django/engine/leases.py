"""Leases: how long a claim lives, as its owner knows it, and the heartbeat that renews it."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final
from weakref import WeakKeyDictionary, finalize

from ..errors import ClaimLost, OperationInProgress
from ..stores import Store
from ..stores.records import Claim

logger = logging.getLogger("idempotency_django")

RENEWALS: Final = 3
RETRIES: Final = 12
"""A lease is renewed after a third of its time; after a failure, again after a twelfth."""

EARLY: Final = 2 * RENEWALS
"""A lease that is due within a sixth of its time is renewed together with those due now."""

LISTED: Final = 3  # operations that a line of the log names


class Lease:
    """The lease of a claim as its owner knows it.

    Until a lease is over, no other attempt can have the claim, so its owner need not ask. The time
    is counted from *before* the store was asked, by a monotonic clock.

    Args:
        store: where the claim was made.
        claim: the claim.
        seconds: how long it lives without renewal.
        asked_at: ``time.monotonic()`` before the store was asked for the claim.
    """

    def __init__(self, store: Store, claim: Claim, seconds: float, asked_at: float) -> None:
        self.store = store
        self.claim = claim
        self.seconds = seconds
        self.ended = False
        self.renewed = False
        self._valid_until = asked_at + self.seconds

    @property
    def is_over(self) -> bool:
        """Whether another attempt may have the claim by now."""
        return time.monotonic() >= self._valid_until

    def renew(self) -> None:
        """Ask the store for more time.

        Raises:
            ClaimLost: the claim has another owner now.
            OperationInProgress: the record is locked now; the lease has not changed.
            StoreUnavailable: the store cannot be reached; the lease has not changed.
        """
        asked_at = time.monotonic()
        if not self.note(self.store.extend(self.claim, self.seconds), asked_at):
            raise ClaimLost

    def note(self, extended: bool, asked_at: float) -> bool:
        """Take note of whether the store, ``asked`` at that time, could still extend the lease."""
        if extended:
            self.renewed = True
            self._valid_until = asked_at + self.seconds
        else:
            self._valid_until = 0.0  # ensure() asks again: from within a test's transaction, say
        return extended

    def ensure(self) -> None:
        """Make sure that the claim is still its owner's; ask the store if it may not be.

        Raises:
            ClaimLost: it is not.
            StoreUnavailable: the store cannot be reached, so it is unknown.
        """
        if self.is_over:
            self.renew()


@contextmanager
def kept_alive(lease: Lease) -> Iterator[None]:
    """Renew the lease for the length of the block, from another thread."""
    heartbeat = _heartbeat_of(lease.store)
    heartbeat.add(lease)
    try:
        yield
    finally:
        lease.ended = True
        heartbeat.drop(lease)


class _Heartbeat:
    """Renews the leases of one store from one thread, in each tick with one statement.

    The thread sleeps until a lease is due, and a lease that is due later than it wakes anyway does
    not wake it: an execution that is over by then costs nothing.
    """

    def __init__(self, store: Store) -> None:
        self._name = f"idempotency-heartbeat-{store.alias}"
        self._condition = threading.Condition()
        self._due: dict[Lease, float] = {}
        self._wakes_at = 0.0  # while the thread is awake: it looks before it sleeps
        self._thread: threading.Thread | None = None
        self._stopped = False
        self.finalizer = finalize(store, self._stop)  # when the store is gone
        self.finalizer.atexit = False  # the thread ends with its process anyway

    def add(self, lease: Lease) -> None:
        with self._condition:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()  # if there are too many threads, the next lease tries again
                self._thread = thread
            due = self._due[lease] = time.monotonic() + lease.seconds / RENEWALS
            if due < self._wakes_at:
                self._wakes_at = due
                self._condition.notify()

    def drop(self, lease: Lease) -> None:
        with self._condition:
            self._due.pop(lease, None)
            if lease.renewed and not self._due:
                self._condition.notify()  # the thread may let go of its connections

    def _stop(self) -> None:
        with self._condition:
            self._stopped = True
            self._condition.notify()

    def _run(self) -> None:
        while due := self._next(patient=True):
            try:
                # The next lease may be far off, so no connection is held until then.
                with due[0].store.dedicated_connection():
                    while due:
                        self._renew(due)
                        due = []  # nor any lease, and with it the store, while this thread waits
                        due = self._next(patient=False)
            except Exception:
                due = []
                logger.warning(
                    "The heartbeat could not open or close its connections.", exc_info=True
                )
                self._postpone()

    def _next(self, *, patient: bool) -> list[Lease]:
        """Wait until a lease is due; none, if it is to stop, or not patient and without leases."""
        with self._condition:
            while not self._stopped and (self._due or patient):
                left = min(self._due.values(), default=math.inf) - time.monotonic()
                if left <= 0:
                    return self._most_urgent()
                self._sleep(left)
            return []

    def _most_urgent(self) -> list[Lease]:
        """The lease that is due first, and those of the same length that are due soon."""
        first = min(self._due, key=self._due.__getitem__)
        soon = time.monotonic() + first.seconds / EARLY
        alike = (lease for lease in self._due if lease.seconds == first.seconds)
        return [lease for lease in alike if self._due[lease] <= soon]

    def _sleep(self, seconds: float) -> None:
        self._wakes_at = time.monotonic() + seconds
        self._condition.wait(None if seconds == math.inf else seconds)
        self._wakes_at = 0.0

    def _renew(self, leases: Sequence[Lease]) -> None:
        """Renew leases of one length, and see when each is due again."""
        asked_at, seconds = time.monotonic(), leases[0].seconds
        problem: Exception = OperationInProgress("The record is locked by another transaction.")
        replies: dict[Lease, bool | None] = dict.fromkeys(leases)
        try:
            extended = leases[0].store.extend_many([lease.claim for lease in leases], seconds)
            replies = dict(zip(leases, extended, strict=True))
        except Exception as error:  # noqa: BLE001  # whatever it is, it is tried again
            problem = error
        for lease, reply in replies.items():
            if reply is None:
                self._again(lease, seconds / RETRIES)
            elif lease.note(reply, asked_at):
                self._again(lease, seconds / RENEWALS)
            else:
                self.drop(lease)
                if not lease.ended:
                    logger.warning(
                        "Attempt %d of %s tried to renew its lease too late: another attempt took "
                        "over, and this one can no longer complete.",
                        lease.claim.attempt,
                        lease.claim.operation.name,
                    )
        if failed := [lease for lease, reply in replies.items() if reply is None]:
            logger.warning(
                "%s could not be renewed; trying again.", _listed(failed), exc_info=problem
            )

    def _again(self, lease: Lease, seconds: float) -> None:
        with self._condition:
            if lease in self._due:  # it has not ended meanwhile
                self._due[lease] = time.monotonic() + seconds

    def _postpone(self) -> None:
        """Leave what is due for a while, so that a fault that lasts is not met in a tight loop."""
        with self._condition:
            now = time.monotonic()
            for lease, due in self._due.items():
                self._due[lease] = max(due, now + lease.seconds / RETRIES)


def _listed(leases: Sequence[Lease]) -> str:
    names = [f"attempt {x.claim.attempt} of {x.claim.operation.name}" for x in leases[:LISTED]]
    more = f" and {len(leases) - LISTED} more" if len(leases) > LISTED else ""
    return f"The lease{'s' if len(leases) > 1 else ''} of {', '.join(names)}{more}"


_heartbeats: WeakKeyDictionary[Store, _Heartbeat] = WeakKeyDictionary()
_making = threading.Lock()


def _heartbeat_of(store: Store) -> _Heartbeat:
    with _making:
        if store not in _heartbeats:
            _heartbeats[store] = _Heartbeat(store)
        return _heartbeats[store]


def _forget_heartbeats() -> None:
    """A forked process has none of its parent's threads, and leases of its own."""
    global _making  # noqa: PLW0603  # it may be held by a thread that is not here
    _making = threading.Lock()
    for heartbeat in _heartbeats.values():
        heartbeat.finalizer.detach()  # who holds the heartbeat's lock may not be here either
    _heartbeats.clear()


os.register_at_fork(after_in_child=_forget_heartbeats)
