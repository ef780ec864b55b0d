"""Leases: how long a claim lives, as its owner knows it, and the heartbeat that renews it."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from weakref import WeakKeyDictionary

from ..errors import ClaimLost
from ..stores import Store
from ..stores.records import Claim

logger = logging.getLogger("idempotency_django")

# Parts of a lease's time.
RENEWED_AFTER: Final = 1 / 3
RETRIED_AFTER: Final = 1 / 12
"""When a renewal that has failed is tried again."""
DUE_SOON: Final = 1 / 6
"""Leases that are due within this part are renewed over the same connection as one due now."""


class Lease:
    """The lease of a claim as its owner knows it.

    Until a lease is over, no other attempt can have the claim, so its owner need not ask. The time
    is counted from *before* the store was asked, by a monotonic clock.

    Args:
        store: where the claim was made, by this thread.
        claim: the claim.
        seconds: how long it lives without renewal.
        asked_at: ``time.monotonic()`` before the store was asked for the claim.
    """

    def __init__(self, store: Store, claim: Claim, seconds: float, asked_at: float) -> None:
        self.store = store
        self.claim = claim
        self.seconds = seconds
        self.place = store.place()
        longest = claim.operation.max_duration
        self.kept_until = asked_at + longest.total_seconds() if longest else math.inf
        self._valid_until = asked_at + seconds

    @property
    def is_over(self) -> bool:
        """Whether another attempt may have the claim by now."""
        return time.monotonic() >= self._valid_until

    def ensure(self) -> None:
        """Make sure that the claim is still its owner's; ask the store if it may not be.

        Raises:
            ClaimLost: it is not.
            StoreUnavailable: the store cannot be reached, so it is unknown.
        """
        if self.is_over:
            self.renew()

    def renew(self) -> None:
        """Ask the store for more time.

        Raises:
            ClaimLost: the claim has another owner now.
            OperationInProgress: the record is locked now; the lease has not changed.
            StoreUnavailable: the store cannot be reached; the lease has not changed.
        """
        asked_at = time.monotonic()
        if not self.store.extend(self.claim, self.seconds):
            # ensure() asks again, since a test's transaction may have been in the way.
            self._valid_until = 0.0
            raise ClaimLost
        self._valid_until = asked_at + self.seconds


@contextmanager
def kept_alive(lease: Lease) -> Iterator[None]:
    """Renew the lease for the length of the block, from another thread."""
    heartbeat = heartbeat_of(lease.store)
    heartbeat.add(lease)
    try:
        yield
    finally:
        heartbeat.drop(lease)


class Heartbeat:
    """Renews the leases of one store, one after the other, from one thread.

    It never stops a handler: one that is late goes on, and finds out when it stores something. The
    thread sleeps until a lease is due, and ends when it finds none. A lease that is due later
    than the thread wakes anyway does not wake it: an execution that is over by then costs nothing.

    Args:
        name: the store's.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._condition = threading.Condition()
        self._due: dict[Lease, float] = {}
        self._thread: threading.Thread | None = None
        self._wakes_at = 0.0  # while the thread is awake: it looks before it sleeps

    def add(self, lease: Lease) -> None:
        """Renew the lease from now on."""
        with self._condition:
            if self._thread is None or not self._thread.is_alive():
                name = f"idempotency-heartbeat-{self._name}"
                thread = threading.Thread(target=self._run, name=name, daemon=True)
                thread.start()  # if there are too many threads, the next lease tries again
                self._thread = thread
            due = self._due[lease] = time.monotonic() + lease.seconds * RENEWED_AFTER
            if due < self._wakes_at:
                self._condition.notify()

    def drop(self, lease: Lease) -> bool:
        """Renew the lease no more; whether it was renewed until now."""
        with self._condition:
            return self._due.pop(lease, None) is not None

    def _run(self) -> None:
        while due := self._next():
            try:
                # For these only: the next lease may be far off.
                with due[0].store.dedicated_connection(due[0].place):
                    for lease in due:
                        self._renew(lease)
            except Exception:
                logger.warning(
                    "The heartbeat could not open or close its connections.", exc_info=True
                )
                for lease in due:
                    self._put_off(lease, lease.seconds * RETRIED_AFTER)
            del due, lease  # so that neither they nor their store are kept while this thread waits

    def _next(self) -> list[Lease]:
        """Wait until a lease is due; return it with those at its place that are due soon.

        The list is empty when no lease is left.
        """
        with self._condition:
            while self._due:
                now, first = time.monotonic(), min(self._due.values())
                if first <= now:
                    lease = min(self._due, key=self._due.__getitem__)
                    soon = now + lease.seconds * DUE_SOON
                    return [
                        each
                        for each, at in self._due.items()
                        if at <= soon and each.place == lease.place
                    ]
                self._wakes_at = first
                self._condition.wait(first - now)
                self._wakes_at = 0.0
            self._thread = None
            return []

    def _renew(self, lease: Lease) -> None:
        """Renew a lease, and see when it is due again."""
        attempt, name = lease.claim.attempt, lease.claim.operation.name
        if lease.kept_until <= time.monotonic():
            if self.drop(lease):
                _log_overdue(lease.claim)
            return
        try:
            lease.renew()
        except ClaimLost:
            if self.drop(lease):
                logger.warning(
                    "Attempt %d of %s tried to renew its lease too late: another attempt took "
                    "over, and this one can no longer complete.",
                    attempt,
                    name,
                )
        except Exception:
            logger.warning(
                "The lease of attempt %d of %s could not be renewed; trying again.",
                attempt,
                name,
                exc_info=True,
            )
            self._put_off(lease, lease.seconds * RETRIED_AFTER)
        else:
            self._put_off(lease, lease.seconds * RENEWED_AFTER)

    def _put_off(self, lease: Lease, seconds: float) -> None:
        with self._condition:
            if lease in self._due:  # it has not ended meanwhile
                self._due[lease] = min(time.monotonic() + seconds, lease.kept_until)


def _log_overdue(claim: Claim) -> None:
    """Tell the operator of a handler that takes too long."""
    logger.error(
        "Attempt %d of %s has run for its max_duration of %s, so its lease is not renewed any "
        "more. After the lease, the operation counts as interrupted (key %s). If the handler "
        "hangs, end its process.",
        claim.attempt,
        claim.operation.name,
        claim.operation.max_duration,
        claim.key,
    )


_heartbeats: WeakKeyDictionary[Store, Heartbeat] = WeakKeyDictionary()


def heartbeat_of(store: Store) -> Heartbeat:
    """The store's heartbeat; two threads that ask for it at once get the same."""
    return _heartbeats.get(store) or _heartbeats.setdefault(store, Heartbeat(store.alias))


# A forked process has none of its parent's threads, and leases of its own.
os.register_at_fork(after_in_child=_heartbeats.clear)
