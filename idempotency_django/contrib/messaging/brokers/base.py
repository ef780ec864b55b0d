"""Publishers send the messages of a topic to a broker, and say what has become of each."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from ....errors import OperationInProgress, StoreUnavailable
from ....stores import reference
from ..consumers import ending
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
        headers: texts for the broker, beside the data.
        created_at: when it was written.
        caused_by: the reference of the record whose handler wrote it; empty: there is none.
    """

    message_id: str
    topic: str
    group: str = ""
    sequence: int = 0
    type: str
    data: Any
    headers: Mapping[str, str] = field(default_factory=dict)
    created_at: datetime
    caused_by: str = ""

    @property
    def reference(self) -> str:
        """The reference to the message in the ``caused_by`` of its consumers' records."""
        return reference(self.message_id, f"outbox:{self.topic}")

    def event(self, source: str) -> Event:
        """The message in the envelope of CloudEvents.

        Args:
            source: the event's source; see :attr:`Publisher.source`.
        """
        extensions: dict[str, str | int | bool] = {"causedby": self.reference}
        if self.group:
            extensions["sequence"] = self.sequence
        return Event(
            id=self.message_id,
            source=source,
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


class DeadlineReached(Deferred):
    """The result for a message that was not begun in time: the next relay may have it at once."""

    def __init__(self) -> None:
        super().__init__("The batch ran out of time")


class Publisher:
    """Hands messages of one topic to a broker. A relay makes one for each topic, and keeps it.

    A subclass has either :meth:`send`, or a :meth:`publish` that sends several at a time.

    Args:
        topic: the topic, which the entry ``"*"`` of ``IDEMPOTENCY["OUTBOX"]`` does not name.
        options: the ``OPTIONS`` of the topic's entry.
    """

    source: str
    """The source of the topic's events, ``SOURCE`` or a slash and the topic. The relay sets it."""

    deadline: float = math.inf
    """The deadline (``time.monotonic()``) for starting another message. The relay sets it, as it
    can record sent messages only before the end of its lease.
    """

    def __init__(self, topic: str, **options: Any) -> None:
        self.topic = topic
        self.source = f"/{topic}"

    def publish(self, messages: Sequence[Outgoing]) -> list[Exception | None]:
        """Send the messages, and wait until the broker has confirmed them.

        Messages of one group come in their order, and must reach the broker in it. After the first
        one of a group that fails, no later one of the group is sent; :class:`Batch` keeps account
        of that. By default, :meth:`send` gets one message after the other.

        Returns:
            For each message, in their order, ``None`` if the broker has confirmed it,
            :exc:`Refused` (or any other exception but these) if it is refused, :exc:`Deferred` if
            it has to wait, and :exc:`BrokerUnavailable` during an outage of the broker.

        Raises:
            Exception: any error counts as :exc:`BrokerUnavailable` for all messages: only what is
                returned for a message counts as its attempt. What the broker has confirmed before
                is sent again.
        """
        batch = Batch(messages, self.deadline)
        for place, message in enumerate(messages):
            group = batch.group_of(place)
            if batch.next(group) == place:
                try:
                    error = self.send(message)
                except KeyboardInterrupt:
                    raise
                except BaseException as raised:  # noqa: BLE001  # what was sent before is known
                    error = unavailable(raised)
                batch.note(group, error)
        return batch.results

    def send(self, message: Outgoing) -> Exception | None:
        """Send one message, and wait until the broker has confirmed it.

        Returns:
            What :meth:`publish` returns for it. After :exc:`BrokerUnavailable`, no other is sent.

        Raises:
            Exception: any error counts as :exc:`BrokerUnavailable`.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Close the connection, after an outage or at the end of the relay; ``publish()`` may be
        called again.
        """


def unavailable(error: BaseException) -> BrokerUnavailable:
    """The outage that an error of the client means; ``error`` is its cause."""
    if isinstance(error, BrokerUnavailable):
        return error
    if not isinstance(error, Exception):
        error = RuntimeError(
            f"It raised {ending(error)}, which would end the relay. Raise a subclass of Exception "
            "instead."
        )
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


class Batch:
    """The messages of one call of :meth:`Publisher.publish`, and what has become of each.

    Only the first unconfirmed message of a group may be under way. A message without a group is
    one of its own.

    Args:
        messages: what to send.
        deadline: by ``time.monotonic()``, when to begin no further message.
    """

    def __init__(self, messages: Sequence[Outgoing], deadline: float) -> None:
        self.messages = messages
        self._deadline = deadline
        self._end: Exception | None = None  # why nothing more is sent
        self._results: dict[int, Exception | None] = {}
        self._waiting: dict[str | int, deque[int]] = {}
        for place in range(len(messages)):
            self._waiting.setdefault(self.group_of(place), deque()).append(place)

    @property
    def groups(self) -> list[str | int]:
        """The groups, in the order of their first messages."""
        return list(self._waiting)

    @property
    def results(self) -> list[Exception | None]:
        """The list that :meth:`Publisher.publish` returns. Unsent messages are not at fault."""
        unsent = self._end or BrokerUnavailable(
            "The publisher did not report whether the message was sent."
        )
        return [self._results.get(place, unsent) for place in range(len(self.messages))]

    def group_of(self, place: int) -> str | int:
        """The group of the message at the place."""
        return self.messages[place].group or place

    def next(self, group: str | int) -> int | None:
        """The place of the group's next message; ``None``: none may be begun now."""
        if self._end is None and time.monotonic() >= self._deadline:
            self._end = DeadlineReached()
        waiting = self._waiting[group]
        return waiting[0] if waiting and self._end is None else None

    def note(self, group: str | int, error: Exception | None) -> None:
        """Note what has become of the group's next message.

        Args:
            group: the group.
            error: what is wrong with it, which holds up its group, or :exc:`BrokerUnavailable`,
                which ends the batch; ``None``: the broker has confirmed it.
        """
        waiting = self._waiting[group]
        if error is None:
            self._results[waiting.popleft()] = None
            return
        self._results |= dict.fromkeys(waiting, error)
        waiting.clear()
        if isinstance(error, BrokerUnavailable):
            self._end = error
