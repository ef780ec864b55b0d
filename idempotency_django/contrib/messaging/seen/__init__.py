"""Filters that know whether an event *may* have been handled: they spare look-ups, and decide none.

A filter only decides whether to ask the store. What it says is never the last word, so one that is
wrong, full, restarted or out of reach loses no event and repeats no effect.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

from django.core.exceptions import ImproperlyConfigured

logger = logging.getLogger("idempotency_django")

PAUSE: Final = 5
"""Seconds without use of a filter after it failed."""


class SeenFilter(ABC):
    """A filter that a consumer asks before it claims an event, and tells after the commit.

    If it says no, the event is claimed at once, and the claim is exact. If it says maybe,
    or cannot be asked, the store is asked first: a duplicate then costs one read, no claim and no
    transaction. Such a duplicate is not counted as a replay in the audit trail.

    Use :class:`~.redis.RedisBloom` or :class:`~.redis.RedisSet`, or write one of your own: a
    subclass with :meth:`contains` and :meth:`add`. One filter may serve several consumers. Threads
    share it.
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
        if time.monotonic() >= self._resumes_at:
            try:
                return [bool(each) for each in self.contains(ids)]
            except ImproperlyConfigured:
                raise
            except Exception:  # noqa: BLE001  # whatever it is, the event is handled
                self._rest()
        return [True] * len(ids)

    def remember(self, ids: Sequence[str]) -> None:
        """:meth:`add`, for events that are committed: a fault is logged and does no harm."""
        if ids and time.monotonic() >= self._resumes_at:
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
