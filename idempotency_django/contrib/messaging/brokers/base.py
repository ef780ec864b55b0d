"""Publishers send the messages of a topic to a broker, and say what has become of each."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from ....errors import OperationInProgress, StoreUnavailable
from ....stores import reference
from ..databases import reason
from ..events import Event


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


class BrokerUnavailable(Exception):
    """The result of a message that could not be sent because of an outage, for example of the
    broker.

    That is no message's fault, so no attempt is counted. The relay lets the topic wait, longer each
    time, and closes the publisher: its next call creates a new client.
    """


class Refused(Exception):
    """The result of a refused message: it counts as an attempt.

    Args:
        why: what is wrong with it.
        delay: when to send it again; the relay waits longer if it would anyway.
        final: whether no further attempt could deliver it.
    """

    def __init__(self, why: str, *, delay: timedelta = timedelta(0), final: bool = False) -> None:
        super().__init__(why)
        self.delay = delay
        self.final = final


class Deferred(Exception):
    """The result of a message that has to wait; others are sent, and no attempt is counted.

    Args:
        why: what is in the way.
        delay: when to send it again.
    """

    def __init__(self, why: str, *, delay: timedelta = timedelta(0)) -> None:
        super().__init__(why)
        self.delay = delay


class Batch:
    """The messages that a publisher is to send, and what has become of each.

    Only the first unconfirmed message of a group may be under way. A message without a group is
    one of its own.

    Args:
        messages: what to send.
        deadline: by ``time.monotonic()``, when to begin no further message: a relay can note what
            was sent only before the end of its lease.

    Attributes:
        results: by its place, what is wrong with a message that was tried; ``None``: nothing.
        outage: the place of a message that could not be sent, and why: it ends the batch.
    """

    def __init__(self, messages: Sequence[Outgoing], deadline: float) -> None:
        self.messages = messages
        self.results: dict[int, Exception | None] = {}
        self.outage: tuple[int, BrokerUnavailable] | None = None
        self._deadline = deadline
        self._is_over = False
        self._waiting: dict[str | int, deque[int]] = {}
        for place in range(len(messages)):
            self._waiting.setdefault(self.group_of(place), deque()).append(place)

    @property
    def groups(self) -> list[str | int]:
        """The groups, in the order of their first messages."""
        return list(self._waiting)

    def group_of(self, place: int) -> str | int:
        """The group of the message at the place."""
        return self.messages[place].group or place

    def next(self, group: str | int) -> int | None:
        """The place of the group's next message; ``None``: none may be begun now."""
        self._is_over = self._is_over or time.monotonic() >= self._deadline
        waiting = self._waiting[group]
        return waiting[0] if waiting and not self._is_over else None

    def note(self, group: str | int, error: Exception | None) -> None:
        """Note what has become of the group's next message.

        Args:
            group: the group.
            error: ``None`` if the broker has confirmed it. Else its group waits:
                :exc:`Refused` (or any other exception but these) if it is refused,
                :exc:`Deferred` if it has to wait, and :exc:`BrokerUnavailable` during an outage of
                the broker.
        """
        waiting = self._waiting[group]
        place = waiting.popleft()
        if error is not None:
            waiting.clear()
        if isinstance(error, BrokerUnavailable):
            self._is_over, self.outage = True, (place, error)
        else:
            self.results[place] = error

    def end(self, outage: BrokerUnavailable) -> None:
        """End the batch: nothing more can be sent."""
        place = min((waiting[0] for waiting in self._waiting.values() if waiting), default=None)
        if place is not None and self.outage is None:
            self._is_over, self.outage = True, (place, outage)

    def refuse_unnoted(self, why: str) -> None:
        """Refuse the messages of which nothing was noted, though there was time for them.

        Another attempt would send them again, and end the same way.
        """
        for group, waiting in self._waiting.items():
            if waiting and not self._is_over:
                self.note(group, Refused(why, final=True))


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

        Messages of one group must reach the broker in their order: :meth:`Batch.next` says which
        one may be sent. By default, :meth:`send` gets one message after the other.

        Raises:
            Exception: any error counts as :exc:`BrokerUnavailable`: only what is noted counts as an
                attempt at a message. What the broker has confirmed, and was not noted, is sent
                again.
        """
        for place, message in enumerate(batch.messages):
            group = batch.group_of(place)
            if batch.next(group) == place:
                try:
                    error = self.send(message)
                except Exception as raised:  # noqa: BLE001  # what was sent before is known
                    error = unavailable(raised)
                batch.note(group, error)

    def send(self, message: Outgoing) -> Exception | None:
        """Send one message, and wait until the broker has confirmed it.

        Returns:
            What :meth:`Batch.note` takes. After :exc:`BrokerUnavailable`, no other is sent.

        Raises:
            Exception: any error counts as :exc:`BrokerUnavailable`.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Close the connection, after an outage or at the end of the relay; ``publish()`` may be
        called again.
        """


def unavailable(error: Exception) -> BrokerUnavailable:
    """The outage that an error of the client means; ``error`` is its cause."""
    if isinstance(error, BrokerUnavailable):
        return error
    found = BrokerUnavailable(reason(error))
    found.__cause__ = error
    return found


def result_of(handle: Callable[[], object]) -> Exception | None:
    """Handle a message in the relay's own process; the result that its publisher returns.

    Raises:
        StoreUnavailable: whether it was handled before is unknown.
        ImportError: the handler, or what it needs, cannot be imported.
    """
    try:
        handle()
    except OperationInProgress as error:
        return Deferred(str(error), delay=timedelta(seconds=error.remaining or 0))
    except (StoreUnavailable, ImportError):
        raise
    except Exception as error:  # noqa: BLE001  # it is the message's
        return error
    return None
