"""What a relay knows of a topic's broker, and what it notes of the broker's answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from ..models import OutboxMessage
from ..models.outbox import OutboxState
from ..reasons import reason
from .batches import Batch, backoff
from .publishers.base import Publisher
from .topics import Topic

logger = logging.getLogger("idempotency_django")

CAREFUL: Final = 100
"""After the broker could not be reached, so many messages are sent one by one: if the publisher
fails with one of them only, it is that message's fault, and the others go on."""


@dataclass(slots=True)
class Line:
    """A topic, as one relay sees it."""

    topic: Topic
    publisher: Publisher
    failures: int = 0  # how often in a row the broker could not be reached
    resumes_at: float = 0  # by time.monotonic()
    careful: int = 0  # how many messages are still to be sent one by one

    @property
    def is_paused(self) -> bool:
        """Whether nothing is sent now, because the broker could not be reached."""
        return self.resumes_at > time.monotonic()

    def pause(self, error: Exception) -> None:
        """Let the broker be for a while, longer each time, as it could not be reached."""
        self.failures, self.careful = self.failures + 1, CAREFUL
        wait = backoff(self.failures).total_seconds()
        self.resumes_at = time.monotonic() + wait
        logger.error(
            "The outbox cannot reach the broker of the topic %r. No message is lost; the next "
            "attempt follows in %.1f seconds.",
            self.topic.name,
            wait,
            exc_info=error,
        )


def note_failures(
    batch: Batch, known: Topic, answers: Iterable[tuple[OutboxMessage, Exception | None]]
) -> None:
    """Note the first failure of each group; those after it were not even tried."""
    for message, error in answers:
        if error is None or message.stream in batch.failed:
            continue
        if message.stream:
            batch.failed.add(message.stream)
        state = batch.mark_failed(message, known, error)
        if state == OutboxState.BLOCKED:
            logger.error(
                "The message %s of the topic %r is blocked after %d attempts%s. Look at it in the "
                "admin, fix what is wrong, and retry or skip it there. The last error: %s",
                message.message_id,
                message.topic,
                message.attempts + 1,
                ", and its group waits" if message.stream else "",
                reason(error),
            )
        else:
            logger.warning(
                "The message %s of the topic %r was refused: %s. It is %s.",
                message.message_id,
                message.topic,
                reason(error).rstrip("."),
                "skipped" if state == OutboxState.SKIPPED else "sent again later",
            )
