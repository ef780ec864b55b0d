"""What a relay knows of a topic's broker, and what it notes of the broker's answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..models import OutboxMessage
from ..models.outbox import OutboxState
from ..reasons import reason
from .batches import Batch, backoff, outgoing
from .publishers.base import Away, Publisher, away
from .topics import Topic, topic

logger = logging.getLogger("idempotency_django")


@dataclass(slots=True)
class Line:
    """A topic, as one relay sees it."""

    name: str
    failures: int = 0  # how often in a row nothing could be sent
    resumes_at: float = 0  # by time.monotonic()
    suspects: set[str] = field(default_factory=set)  # what sending failed with: others go first
    publisher: Publisher | None = None

    def publish(self, messages: Sequence[OutboxMessage], until: float) -> list[Exception | None]:
        """What the publisher answers for each message."""
        try:
            if self.publisher is None:
                self.publisher = topic(self.name).publisher()
            self.publisher.until = until
            answers = self.publisher.publish([outgoing(message) for message in messages])
        except (Exception, SystemExit) as error:  # noqa: BLE001  # it says nothing of any message
            return [away(error)] * len(messages)
        if (
            isinstance(answers, Sequence)
            and len(answers) == len(messages)
            and all(answer is None or isinstance(answer, Exception) for answer in answers)
        ):
            return list(answers)
        wrong = TypeError(
            f"{type(self.publisher).__name__}.publish() has returned {answers!r}. Have it return "
            "a list with one answer for each message: None if the broker has confirmed it, else "
            "an exception."
        )
        return [wrong] * len(messages)

    def pause(self, error: Away) -> None:
        """Let the topic wait, longer each time; the publisher's client is made anew after it."""
        self.failures += 1
        wait = backoff(self.failures).total_seconds()
        self.resumes_at = time.monotonic() + wait
        logger.error(
            "The topic %r waits for %.1f seconds, because nothing of it can be sent: %s. No "
            "message is lost, and no attempt is counted.",
            self.name,
            wait,
            str(error).rstrip(" .:"),
            exc_info=error,
        )
        self.close()

    def close(self) -> None:
        """Leave the broker."""
        try:
            if self.publisher is not None:
                self.publisher.close()
        except Exception:
            logger.warning("The publisher of %r could not be closed.", self.name, exc_info=True)


def whose(message: OutboxMessage) -> str:
    """What waits together: the message's group, or itself."""
    name: str = message.stream or message.message_id
    return name


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
                "The message %s of the topic %r is blocked after attempt %d%s. Look at it in the "
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
