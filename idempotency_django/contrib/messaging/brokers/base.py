"""Publishers send the messages of a topic to a broker, and say what has become of each."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from heapq import heappop, heappush
from typing import Any, Final

from ....errors import OperationInProgress, StoreUnavailable
from ....stores import reference
from ..events import Event

HANDLER_OUTAGES: Final = (StoreUnavailable, ImportError)
"""The errors of handlers in the relay's process that are no message's: whether it was handled
before is unknown, or the code that handles it cannot be imported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A message of the outbox, as a publisher gets it.

    Attributes:
        message_id: names the message, the same each time that it is sent.
        topic: where it goes.
        group: messages of one topic and group are sent in their order; empty: in any order.
        sequence: its number within the group, from 1 and without gaps; 0 if there is no group.
        type: what happened, such as ``"order.paid"``.
        data: what JSON can say, or bytes.
        created_at: when it was written.
        caused_by: the reference of the record whose handler wrote it; empty: there is none.
    """

    message_id: str
    topic: str
    group: str = ""
    sequence: int = 0
    type: str
    data: Any
    created_at: datetime
    caused_by: str = ""

    @property
    def reference(self) -> str:
        """The reference to the message in the ``caused_by`` of its consumers' records."""
        return reference(self.message_id, f"outbox:{self.topic}")

    def event(self) -> Event:
        """The message in the envelope of CloudEvents; its source is a slash and the topic."""
        extensions: dict[str, str | int | bool] = {"causedby": self.reference}
        if self.group:
            extensions["sequence"] = self.sequence
        return Event(
            id=self.message_id,
            source=f"/{self.topic}",
            type=self.type,
            data=self.data,
            subject=self.group or None,
            time=self.created_at,
            extensions=extensions,
        )


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

    A loop over it gets those that may be begun now: of each group the first one. The group's next
    one follows as soon as :meth:`note` says that it was sent.

    Args:
        messages: what to send.
        deadline: by ``time.monotonic()``, when to begin no further message: a relay can note what
            was sent only before the end of its lease.

    Attributes:
        messages: all of them.
        begun: the messages that were begun and not noted, by their ids.
        results: what is wrong with each message that was tried, by its id; ``None``: nothing.
    """

    def __init__(self, messages: Sequence[Outgoing], deadline: float) -> None:
        self.messages = messages
        self.begun: dict[str, Outgoing] = {}
        self.results: dict[str, Exception | None] = {}
        self._deadline = deadline
        self._lines: dict[str, list[tuple[int, Outgoing]]] = {}
        for place, message in reversed([*enumerate(messages)]):
            self._lines.setdefault(_line_of(message), []).append((place, message))
        self._ready = sorted(line.pop() for line in self._lines.values())

    def __iter__(self) -> Iterator[Outgoing]:
        while self._ready and time.monotonic() < self._deadline:
            _, message = heappop(self._ready)
            self.begun[message.message_id] = message
            yield message

    def note(self, message: Outgoing, error: Exception | None = None) -> None:
        """Note what has become of a message that was begun.

        Args:
            message: the message.
            error: why it was not sent, and its group has to wait. It counts as an attempt, but for
                :exc:`~idempotency_django.errors.OperationInProgress`. ``None``: it was.

        Raises:
            ValueError: the message was noted before, or was not begun.
        """
        if self.begun.pop(message.message_id, None) is None:
            raise ValueError(
                f"The message {message.message_id} cannot be noted: it was noted before, or the "
                "loop over the batch has not given it yet."
            )
        self.results[message.message_id] = error
        if error is None and (line := self._lines[_line_of(message)]):
            heappush(self._ready, line.pop())

    def refuse_unnoted(self, why: str) -> None:
        """Refuse the messages that were begun and not noted.

        Another attempt would send them again, and end the same way. If nothing was begun, the
        publisher has not asked for what it may begin: that is all that it could have.
        """
        for message in [*self.begun.values()] or ([] if self.results else [*self]):
            self.note(message, Refused(why, final=True))


def _line_of(message: Outgoing) -> str:
    """What a message waits in: its group, or a line of its own."""
    return f"group {message.group}" if message.group else message.message_id


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

    def send(self, message: Outgoing) -> None:
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
