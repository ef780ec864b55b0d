"""Filters that know whether an event *may* have been handled: they spare look-ups, and decide none.

A filter only decides whether to ask the store. What it says is never the last word, so one that is
wrong, full, restarted or out of reach loses no event and repeats no effect.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured

logger = logging.getLogger("idempotency_django")

PAUSE: Final = 5
"""Seconds without use of a filter after it failed."""


class SeenFilter(ABC):
    """A filter that a consumer asks before it claims an event, and tells after the commit.

    If it says no, the event is claimed at once, and the claim is exact. If it says maybe,
    or cannot be asked, the store is asked first: a duplicate then costs one read, no claim and no
    transaction. Such a duplicate is not counted as a replay in the audit trail.

    Use one of :class:`InProcessBloom`, :class:`~.redis.RedisBloom` and
    :class:`~.redis.RedisSet`, or write one of your own: a subclass with :meth:`contains` and
    :meth:`add`. One filter may serve several consumers. Threads share it.
    """

    _resumes_at: float = 0

    @abstractmethod
    def contains(self, ids: Sequence[str]) -> Sequence[bool]:
        """Whether each of the ids may have been added. One that was may be forgotten again."""

    @abstractmethod
    def add(self, ids: Sequence[str]) -> None:
        """Add the ids. Some may be there already."""

    def may_contain(self, ids: Sequence[str]) -> Sequence[bool]:
        """:meth:`contains`; after a fault each of them may be there. A fault is logged.

        Raises:
            ImproperlyConfigured: the filter cannot work as it is configured.
        """
        if time.monotonic() < self._resumes_at:
            return [True] * len(ids)
        try:
            return self._checked(ids)
        except ImproperlyConfigured:
            raise
        except Exception:  # noqa: BLE001  # whatever it is, the event is handled
            self._rest()
            return [True] * len(ids)

    def _checked(self, ids: Sequence[str]) -> Sequence[bool]:
        found = list(map(bool, self.contains(ids)))
        if len(found) != len(ids):
            raise ValueError(f"It returned {len(found)} results for {len(ids)} ids.")
        return found

    def remember(self, ids: Sequence[str]) -> None:
        """:meth:`add`, for events that are committed: a fault is logged and does no harm."""
        if not ids or time.monotonic() < self._resumes_at:
            return
        try:
            self.add(ids)
        except Exception:  # noqa: BLE001  # what was done is committed
            self._rest()

    def _rest(self) -> None:
        self._resumes_at = time.monotonic() + PAUSE
        logger.warning(
            "The filter of seen events %r failed. For %d seconds, each event is looked up in the "
            "store, which is slower but equally safe.",
            self,
            PAUSE,
            exc_info=True,  # noqa: LOG014  # called by the exception handlers
        )


def validate_sizes(capacity: int, error: float, generations: int) -> None:
    """Refuse the numbers of a Bloom filter that could not be one.

    Raises:
        ValueError: one of them is out of its range.
    """
    if capacity < 1 or not 0 < error < 1 or generations < 1:
        raise ValueError(
            f"A filter got capacity={capacity}, error={error} and generations={generations}. "
            "capacity and generations must be 1 or more, and error must be between 0 and 1, such "
            "as 0.001."
        )


class InProcessBloom(SeenFilter):
    """Remembers what this process has handled, in some 2 bytes for each event, by ``rbloom``.

    Other processes do not share it, and a restart empties it. So it suits a partition that one
    process reads for long, or an archive that is read again.

    Args:
        capacity: how many events one generation takes. When it is full, a new one begins, and the
            oldest one is forgotten.
        error: the share of new events that it takes for seen, for which the store is asked in vain.
        generations: how many generations are remembered.

    Raises:
        ValueError: one of them is out of its range.
        ModuleNotFoundError: the extra ``[bloom]`` is not installed.
    """

    def __init__(self, capacity: int, *, error: float = 0.001, generations: int = 2) -> None:
        validate_sizes(capacity, error, generations)
        try:
            from rbloom import Bloom  # noqa: PLC0415  # an extra
        except ImportError as missing:
            raise ModuleNotFoundError(
                'InProcessBloom needs rbloom. Run pip install "idempotency-django[bloom]".',
                name="rbloom",
            ) from missing
        self._make = partial(Bloom, capacity, error / generations)  # each of them adds its error
        self.capacity = capacity
        self._generations: deque[Any] = deque(maxlen=generations)
        self._size = capacity
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<InProcessBloom of {self.capacity}>"

    def contains(self, ids: Sequence[str]) -> Sequence[bool]:
        with self._lock:
            return [any(each in bloom for bloom in self._generations) for each in ids]

    def add(self, ids: Sequence[str]) -> None:
        with self._lock:
            for each in ids:
                if self._size >= self.capacity:
                    self._generations.append(self._make())
                    self._size = 0
                newest = self._generations[-1]
                self._size += each not in newest
                newest.add(each)
