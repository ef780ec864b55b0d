"""Publishers send the messages of a topic to a broker, and say what has become of each."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from heapq import heappop, heappush
from typing import Any, Final

from ....errors import OperationInProgress, StoreUnavailable
from ..events import Event

HANDLER_OUTAGES: Final = (StoreUnavailable, ImportError)
"""The errors of handlers in the relay's process that are no message's: whether it was handled
before is unknown, or the code that handles it cannot be imported."""


class Refused(Exception):
    """A message was refused, which counts as an attempt at it.

    Args:
        why: what is wrong with it.
        delay: when to send it again; the relay waits longer if it would anyway.
        final: whether no further attempt could deliver it.
    """

    def __init__(self, why: str, *, delay: timedelta = timedelta(0), final: bool = False) -> None:
        super().__init__(why)
        self.delay = delay
        self.final = final


class Batch:
    """The messages that a publisher is to send, and what has become of each.

    A loop over it gets those that may be begun now: the first of each group, which is the event's
    subject. The group's next one follows as soon as :meth:`note` says that it was sent.

    Args:
        messages: what to send.
        deadline: by ``time.monotonic()``, when to begin no further message: a relay can note what
            was sent only before the end of its lease.

    Attributes:
        messages: all of them.
        begun: the messages that were begun and not noted, by their ids.
        results: what is wrong with each message that was tried, by its id; ``None``: nothing.
    """

    def __init__(self, messages: Sequence[Event], deadline: float) -> None:
        self.messages = messages
        self.begun: dict[str, Event] = {}
        self.results: dict[str, Exception | None] = {}
        self._deadline = deadline
        self._lines: dict[str, list[tuple[int, Event]]] = {}
        for place, message in reversed([*enumerate(messages)]):
            self._lines.setdefault(_line_of(message), []).append((place, message))
        self._ready = sorted(line.pop() for line in self._lines.values())

    def __iter__(self) -> Iterator[Event]:
        while self._ready and time.monotonic() < self._deadline:
            _, message = heappop(self._ready)
            self.begun[message.id] = message
            yield message

    def note(self, message: Event, error: Exception | None = None) -> None:
        """Note what has become of a message that was begun.

        Args:
            message: the message.
            error: why it was not sent, and its group has to wait. It counts as an attempt, but for
                :exc:`~idempotency_django.errors.OperationInProgress`. ``None``: it was.

        Raises:
            ValueError: the message was noted before, or was not begun.
        """
        if self.begun.pop(message.id, None) is None:
            raise ValueError(
                f"The message {message.id} cannot be noted: it was noted before, or the "
                "loop over the batch has not given it yet."
            )
        self.results[message.id] = error
        if error is None and (line := self._lines[_line_of(message)]):
            heappush(self._ready, line.pop())

    def refuse_unnoted(self, why: str) -> None:
        """Refuse the messages that were begun and not noted.

        Another attempt would send them again, and end the same way. If nothing was begun, the
        publisher has not asked for what it may begin: that is all that it could have.
        """
        for message in [*self.begun.values()] or ([] if self.results else [*self]):
            self.note(message, Refused(why, final=True))


def _line_of(message: Event) -> str:
    """What a message waits in: its group, or a line of its own."""
    return f"group {message.subject}" if message.subject else message.id


class Publisher:
    """Hands messages of one topic to a broker. A relay makes one for each topic, and keeps it.

    A subclass has either :meth:`send`, or a :meth:`publish` that sends several at a time.

    Args:
        topic: the topic.
        options: the ``OPTIONS`` of the topic's entry.
    """

    def __init__(self, topic: str, **options: Any) -> None:
        self.topic = topic

    def publish(self, batch: Batch) -> None:
        """Send the messages of a batch, and :meth:`~Batch.note` what has become of each.

        By default, :meth:`send` gets one message after the other.

        Raises:
            Exception: an outage: no attempt is counted. The relay lets the topic wait, longer each
                time, and closes the publisher, so that its next call creates a new client. What
                the broker has confirmed, and was not noted, is sent again.
        """
        for message in batch:
            try:
                self.send(message)
            except Exception as error:
                if self.is_outage(error):
                    raise
                batch.note(message, error)
            else:
                batch.note(message)

    def send(self, message: Event) -> None:
        """Send one message, and wait until the broker has confirmed it.

        Raises:
            Refused: the message is not accepted; others may be.
            Exception: any other error is an outage, unless :meth:`is_outage` says otherwise.
        """
        raise NotImplementedError

    def is_outage(self, error: Exception) -> bool:
        """Whether an error of :meth:`send` affects all messages; else it is this message's."""
        return not isinstance(error, Refused | OperationInProgress)

    def close(self) -> None:
        """Close the connection, after an outage or at the end of the relay; ``publish()`` may be
        called again.
        """
