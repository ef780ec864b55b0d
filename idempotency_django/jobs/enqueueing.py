"""The way from a task to the outbox: this room knows no messaging, so messaging says how."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

from django.core.exceptions import ImproperlyConfigured


class Enqueue(Protocol):
    """Writes the message of a task in the caller's transaction."""

    def __call__(
        self,
        task: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        dedup_id: str | None,
        window: timedelta | None,
        unfinished: Callable[[], bool],
    ) -> str:
        """Write it, and return the id that the task will have.

        Args:
            task: the task's name.
            args: positional arguments, as JSON can say them.
            kwargs: keyword arguments, likewise.
            dedup_id: names the call: within the window, only the first one is written.
            window: for how long.
            unfinished: whether the operation of a task that was sent has ended without success, so
                that the next call is written nevertheless.
        """


_ways: list[Enqueue] = []


def register(enqueue: Enqueue) -> None:
    """Let tasks be enqueued like this.

    Args:
        enqueue: what writes a message.
    """
    _ways[:] = [enqueue]


def enqueue() -> Enqueue:
    """What writes the message of a task.

    Raises:
        ImproperlyConfigured: nothing does.
    """
    if not _ways:
        raise ImproperlyConfigured(
            "enqueue_once() writes the task into the outbox, which is not installed. Add "
            '"idempotency_django.messaging" to INSTALLED_APPS, a topic "celery" to '
            "IDEMPOTENCY['OUTBOX'], and run a relay."
        )
    return _ways[0]
