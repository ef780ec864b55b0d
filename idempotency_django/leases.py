"""Leases: how long a claim lives, as its owner knows it, and the heartbeat that renews it."""

from __future__ import annotations

import heapq
import logging
import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Final
from weakref import WeakKeyDictionary, finalize

from django.db import connections

from .errors import ClaimLost
from .records import Claim
from .stores import Store

logger = logging.getLogger("idempotency_django")

RENEWALS: Final = 3
RETRIES: Final = 12
"""A lease is renewed after a third of its time; what fails is tried again after a twelfth."""

CROWD: Final = 256  # leases, of which those that ended are dropped before they are due


class Lease:
    """The lease of a claim as its owner knows it.

    Until a lease is over nobody else can have the claim, so its owner need not ask: time is
    counted from *before* the store was asked, by a clock that nobody sets.

    Args:
        store: where the claim was made.
        claim: the claim.
        seconds: how long it lives without being renewed.
        asked: ``time.monotonic()`` before the store was asked for the claim.
    """

    def __init__(self, store: Store, claim: Claim, seconds: float, asked: float) -> None:
        self.store = store
        self.claim = claim
        self.seconds = seconds
        self.ended = False
        self.renewed = False
        self._valid_until = asked + self.seconds

    @property
    def is_over(self) -> bool:
        """Whether somebody else may have the claim by now."""
        return time.monotonic() >= self._valid_until

    def renew(self) -> None:
        """Ask the store for more time.

        Raises:
            ClaimLost: the claim has another owner now.
            StoreUnavailable: the store cannot be reached; the lease is as long as it was.
        """
        asked = time.monotonic()
        if not self.store.extend(self.claim, self.seconds):
            self._valid_until = 0.0  # ensure() asks again: from within a test's transaction, say
            raise ClaimLost
        self.renewed = True
        self._valid_until = asked + self.seconds

    def ensure(self) -> None:
        """Make sure that the claim is still its owner's; asks the store where it may not be.

        Raises:
            ClaimLost: it is not.
            StoreUnavailable: the store cannot be reached, so nobody knows.
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
        if lease.renewed:
            heartbeat.wake()  # it may let go of its connections


class _Heartbeat:
    """Renews the leases of one store, from one thread, which has connections of its own.

    The thread sleeps until a lease is due, and a lease that is due later than it wakes anyway does
    not wake it: an execution that is over by then costs nothing.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._due: list[tuple[float, int, Lease]] = []
        self._wakes_at = 0.0  # while the thread is awake: it looks before it sleeps
        self._numbers = count()  # for leases that are due at the same moment
        self._thread: threading.Thread | None = None
        self._crowd = CROWD
        self._stopped = False
        self._finalizer: finalize[[], Store] | None = None

    def add(self, lease: Lease) -> None:
        with self._condition:
            if self._thread is None:
                name = f"idempotency-heartbeat-{lease.store.alias}"
                thread = threading.Thread(target=self._beat, name=name, daemon=True)
                thread.start()  # where there are too many, the next lease tries again
                self._thread = thread
            if len(self._due) >= self._crowd:
                self._due = [entry for entry in self._due if not entry[2].ended]
                heapq.heapify(self._due)
                self._crowd = max(CROWD, 2 * len(self._due))
            self._put(lease, RENEWALS)

    def wake(self) -> None:
        with self._condition:
            self._condition.notify()

    def ends_with(self, store: Store) -> None:
        """Stop when nobody has the store any more."""
        self._finalizer = finalize(store, self._stop)
        self._finalizer.atexit = False  # the thread ends with its process anyway

    def abandon(self) -> None:
        """Leave all as it is: the thread, and whoever held its lock, are in another process."""
        if self._finalizer is not None:
            self._finalizer.detach()

    def _stop(self) -> None:
        self._stopped = True
        self.wake()

    def _put(self, lease: Lease, fraction: int) -> None:
        due = time.monotonic() + lease.seconds / fraction
        heapq.heappush(self._due, (due, next(self._numbers), lease))
        if due < self._wakes_at:
            self._wakes_at = due
            self._condition.notify()

    def _beat(self) -> None:
        connected = False
        while not self._stopped:
            lease = self._next(patient=not connected)
            if lease is None:
                _disconnect()  # it may be long until the next one
                connected = False
                continue
            connected = True
            fraction = _renew(lease)
            if fraction:
                with self._condition:
                    self._put(lease, fraction)
            del lease  # and with it the store, while this thread waits

    def _next(self, *, patient: bool) -> Lease | None:
        """The next lease that is due and not over; ``None``, unless patient: there is none."""
        with self._condition:
            while True:
                if not patient:
                    self._drop_ended()
                if not self._due:
                    if not patient or self._stopped:
                        return None
                    self._sleep(math.inf)
                elif (left := self._due[0][0] - time.monotonic()) > 0:
                    self._sleep(left)
                elif self._due[0][2].ended:
                    # Not sooner: with nothing left to wait for, every execution would wake it.
                    self._drop_ended()
                else:
                    return heapq.heappop(self._due)[2]

    def _drop_ended(self) -> None:
        while self._due and self._due[0][2].ended:
            heapq.heappop(self._due)

    def _sleep(self, seconds: float) -> None:
        self._wakes_at = time.monotonic() + seconds
        self._condition.wait(None if seconds == math.inf else seconds)
        self._wakes_at = 0.0


def _disconnect() -> None:
    try:
        connections.close_all()
    except Exception:
        logger.warning("The heartbeat could not close its connections.", exc_info=True)


def _renew(lease: Lease) -> int:
    """Renew a lease; after which fraction of its time it is due again, 0: never."""
    attempt, name = lease.claim.attempt, lease.claim.operation.name
    try:
        lease.renew()
    except ClaimLost:
        if not lease.ended:
            logger.warning(
                "Attempt %d of %s came too late to renew its lease: it has been taken over and "
                "cannot complete any more.",
                attempt,
                name,
            )
        return 0
    except Exception:
        logger.warning(
            "The lease of attempt %d of %s could not be renewed; trying again.",
            attempt,
            name,
            exc_info=True,
        )
        return RETRIES
    return RENEWALS


_heartbeats: WeakKeyDictionary[Store, _Heartbeat] = WeakKeyDictionary()
_making = threading.Lock()


def _heartbeat_of(store: Store) -> _Heartbeat:
    heartbeat = _heartbeats.get(store)
    if heartbeat is None:
        with _making:
            heartbeat = _heartbeats.setdefault(store, _Heartbeat())
            heartbeat.ends_with(store)
    return heartbeat


def _forget_heartbeats() -> None:
    """A forked process has none of its parent's threads, and leases of its own."""
    global _making  # noqa: PLW0603  # it may be held by a thread that is not here
    _making = threading.Lock()
    for heartbeat in _heartbeats.values():
        heartbeat.abandon()
    _heartbeats.clear()


os.register_at_fork(after_in_child=_forget_heartbeats)
