"""Leases: how long a claim lives, as its owner knows it, and the heartbeat that renews it."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final
from weakref import WeakKeyDictionary, finalize

from ..errors import ClaimLost, OperationInProgress
from ..records import Claim
from ..stores import Store

logger = logging.getLogger("idempotency_django")

RENEWALS: Final = 3
RETRIES: Final = 12
"""A lease is renewed after a third of its time; after a failure, again after a twelfth."""

EARLY: Final = 2 * RENEWALS
"""A lease that is due within a sixth of its time is renewed together with those due now."""

NAMED: Final = 3  # operations that a line of the log names


class Lease:
    """The lease of a claim as its owner knows it.

    Until a lease is over, nobody else can have the claim, so its owner need not ask. The time is
    counted from *before* the store was asked, by a monotonic clock.

    Args:
        store: where the claim was made.
        claim: the claim.
        seconds: how long it lives without renewal.
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
            OperationInProgress: the record is locked now; the lease has not changed.
            StoreUnavailable: the store cannot be reached; the lease has not changed.
        """
        asked = time.monotonic()
        if not self.note(self.store.extend(self.claim, self.seconds), asked):
            raise ClaimLost

    def note(self, extended: bool, asked: float) -> bool:
        """Take note of what the store answered when it was asked for more time.

        Args:
            extended: whether the claim is still its owner's, and has its time.
            asked: ``time.monotonic()`` before the store was asked.
        """
        if extended:
            self.renewed = True
            self._valid_until = asked + self.seconds
        else:
            self._valid_until = 0.0  # ensure() asks again: from within a test's transaction, say
        return extended

    def ensure(self) -> None:
        """Make sure that the claim is still its owner's; ask the store if it may not be.

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
        heartbeat.drop(lease)


class _Heartbeat:
    """Renews the leases of one store from one thread, all that are due in one go.

    The thread sleeps until a lease is due, and a lease that is due later than it wakes anyway does
    not wake it: an execution that is over by then costs nothing.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._due: dict[Lease, float] = {}
        self._wakes_at = 0.0  # while the thread is awake: it looks before it sleeps
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._finalizer: finalize[[], Store] | None = None

    def add(self, lease: Lease) -> None:
        with self._condition:
            if self._thread is None:
                name = f"idempotency-heartbeat-{lease.store.alias}"
                thread = threading.Thread(target=self._run, name=name, daemon=True)
                thread.start()  # where there are too many, the next lease tries again
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

    def ends_with(self, store: Store) -> None:
        """Stop when nobody has the store any more."""
        self._finalizer = finalize(store, self._stop)
        self._finalizer.atexit = False  # the thread ends with its process anyway

    def abandon(self) -> None:
        """Leave all as it is: the thread, and whoever held its lock, are in another process."""
        if self._finalizer is not None:
            self._finalizer.detach()

    def _stop(self) -> None:
        with self._condition:
            self._stopped = True
            self._condition.notify()

    def _run(self) -> None:
        while due := self._next(patient=True):
            try:
                # It may be long until the next one, so nothing is held while there is none.
                with due[0].store.undisturbed():
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

    def _renew(self, leases: Sequence[Lease]) -> None:
        for lease, fraction in _renewed(leases):
            with self._condition:
                if lease not in self._due:  # it has ended meanwhile
                    continue
                if fraction:
                    self._due[lease] = time.monotonic() + lease.seconds / fraction
                else:
                    del self._due[lease]

    def _postpone(self) -> None:
        """Leave what is due for a while, so that a fault that lasts is not met in a tight loop."""
        with self._condition:
            now = time.monotonic()
            for lease, due in self._due.items():
                self._due[lease] = max(due, now + lease.seconds / RETRIES)

    def _next(self, *, patient: bool) -> list[Lease]:
        """The leases that are to be renewed, as soon as one is due.

        None, when the heartbeat is to stop, or is not patient and has no lease left.
        """
        with self._condition:
            while not self._stopped:
                if self._due:
                    now = time.monotonic()
                    left = min(self._due.values()) - now
                    if left <= 0:
                        return [
                            lease
                            for lease, due in self._due.items()
                            if due - now <= lease.seconds / EARLY
                        ]
                    self._sleep(left)
                elif patient:
                    self._sleep(math.inf)
                else:
                    break
            return []

    def _sleep(self, seconds: float) -> None:
        self._wakes_at = time.monotonic() + seconds
        self._condition.wait(None if seconds == math.inf else seconds)
        self._wakes_at = 0.0


def _renewed(leases: Sequence[Lease]) -> Iterator[tuple[Lease, int]]:
    """Renew leases of one store; after which fraction of its time each is due again, 0: never."""
    alike: dict[float, list[Lease]] = defaultdict(list)
    for lease in leases:
        alike[lease.seconds].append(lease)
    for seconds, several in alike.items():
        asked = time.monotonic()
        problem: Exception = OperationInProgress("The record is locked by somebody else.")
        try:
            extended = several[0].store.extend_many([lease.claim for lease in several], seconds)
            results = dict(zip(several, extended, strict=True))
        except Exception as error:  # noqa: BLE001  # whatever it is, it is tried again
            results, problem = dict.fromkeys(several), error
        failed = []
        for lease, result in results.items():
            if result is None:
                failed.append(lease)
                yield lease, RETRIES
            elif lease.note(result, asked):
                yield lease, RENEWALS
            else:
                _log_loss(lease)
                yield lease, 0
        if failed:
            logger.warning(
                "%s could not be renewed; trying again.", _named(failed), exc_info=problem
            )


def _log_loss(lease: Lease) -> None:
    if not lease.ended:
        logger.warning(
            "Attempt %d of %s tried to renew its lease too late: another attempt took over, and "
            "this one can no longer complete.",
            lease.claim.attempt,
            lease.claim.operation.name,
        )


def _named(leases: Sequence[Lease]) -> str:
    names = [f"attempt {x.claim.attempt} of {x.claim.operation.name}" for x in leases[:NAMED]]
    if len(leases) == 1:
        return f"The lease of {names[0]}"
    more = f" and {len(leases) - NAMED} more" if len(leases) > NAMED else ""
    return f"The leases of {', '.join(names)}{more}"


_heartbeats: WeakKeyDictionary[Store, _Heartbeat] = WeakKeyDictionary()
_making = threading.Lock()


def _heartbeat_of(store: Store) -> _Heartbeat:
    heartbeat = _heartbeats.get(store)
    if heartbeat is None:
        with _making:
            heartbeat = _heartbeats.get(store)
            if heartbeat is None:
                heartbeat = _heartbeats[store] = _Heartbeat()
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
