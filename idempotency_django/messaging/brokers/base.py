"""What a publisher is, and what it gets to publish."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.core.checks import CheckMessage

from ...records import reference
from ..consumers import ending
from ..events import Event
from ..queue import reason


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
        """What names it in the ``caused_by`` of what its consumers do."""
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


class Away(Exception):
    """What a publisher answers while what all messages need is away, such as its broker.

    That is no message's fault, so no attempt is counted. The relay lets the topic wait, longer each
    time, and closes the publisher: its next call makes its client anew.
    """


class Refused(Exception):
    """What a publisher answers for a message that is refused: this was one of its attempts.

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
    """What a publisher answers for a message that has to wait; others go on, no attempt is counted.

    Args:
        why: what is in the way.
        delay: when to send it again.
    """

    def __init__(self, why: str, *, delay: timedelta = timedelta(0)) -> None:
        super().__init__(why)
        self.delay = delay


class DeadlineReached(Deferred):
    """What :meth:`Publisher.late` answers: the next relay may have the message at once."""

    def __init__(self) -> None:
        super().__init__("There was no time left for it")


class Publisher:
    """Hands messages of one topic to a broker. A relay makes one for each topic, and keeps it.

    Args:
        topic: the topic, which the entry ``"*"`` of ``IDEMPOTENCY["OUTBOX"]`` does not name.
        options: the ``OPTIONS`` of the topic's entry.
    """

    source: str
    """The source of the topic's events. The relay sets it: ``SOURCE``, or a slash and the topic."""

    deadline: float = math.inf
    """By ``time.monotonic()``, when to begin no further message. The relay sets it."""

    def __init__(self, topic: str, **options: Any) -> None:
        self.topic = topic
        self.source = f"/{topic}"

    def publish(self, messages: Sequence[Outgoing]) -> list[Exception | None]:
        """Send the messages, and wait until the broker has confirmed them.

        Messages of one group come in their order, and must reach the broker in it. After the first
        one of a group that fails, send no later one of the group; :func:`in_order` does that.

        Returns:
            For each message, in their order: ``None`` if the broker has confirmed it,
            :exc:`Refused` (or any other exception but these) if it is refused, :exc:`Deferred` if
            it has to wait, and :exc:`Away` if the broker is away.

        Raises:
            Exception: as if all were answered with :exc:`Away`, whatever it is: only what is
                answered for a message counts as its attempt. What the broker has confirmed before
                is sent again.
        """
        raise NotImplementedError

    def late(self) -> DeadlineReached | None:
        """What to answer for a message that is not begun yet, if the time of the batch is over.

        The relay notes what was sent after :meth:`publish`. After the end of its lease it could
        not, and all of the batch would be sent again.
        """
        return DeadlineReached() if time.monotonic() >= self.deadline else None

    def close(self) -> None:
        """Leave the broker, which is away, or the relay ends; ``publish()`` may be called again."""

    def check(self) -> list[CheckMessage]:
        """What ``manage.py check`` is to say of the options. It must not ask the broker."""
        return []


def exited(error: BaseException) -> Exception:
    """What is wrong with a message whose handling would have ended the relay, which goes on."""
    return RuntimeError(
        f"It has ended with {ending(error)}, which would end the relay. Raise an error instead."
    )


def away(error: BaseException) -> Away:
    """Why nothing can be sent; ``error`` is its cause."""
    if isinstance(error, Away):
        return error
    if not isinstance(error, Exception):
        error = exited(error)
    found = Away(reason(error))
    found.__cause__ = error
    return found


def in_order(
    messages: Sequence[Outgoing], send: Callable[[Outgoing], Exception | None]
) -> list[Exception | None]:
    """Send one message after the other, and none of a group after the first that failed.

    Args:
        messages: what to send.
        send: sends one; what is wrong with it, or ``None``. Once it answers :exc:`Away`, or raises
            anything, nothing more is sent.

    Returns:
        What :meth:`Publisher.publish` returns.
    """
    failed: dict[str, Exception] = {}
    answers: list[Exception | None] = []
    gone: Away | None = None
    for message in messages:
        error = gone or (failed.get(message.group) if message.group else None)
        if error is None:
            try:
                error = send(message)
            except KeyboardInterrupt:
                raise
            except BaseException as raised:  # noqa: BLE001  # what was sent is known
                error = away(raised)
        if isinstance(error, Away):
            gone = error
        if error is not None:
            failed[message.group] = error
        answers.append(error)
    return answers


class GroupedBatch:
    """What one call of :meth:`~.base.Publisher.publish` is to send, and what has become of it.

    The messages of a group stand in one line, and only the first of them may be under way. A
    message without a group has a line of its own.

    Args:
        messages: what to send.
    """

    def __init__(self, messages: Sequence[Outgoing]) -> None:
        self.messages = messages
        self.answers: list[Exception | None] = [None] * len(messages)
        self._lines: dict[str | int, deque[int]] = {}
        for place, message in enumerate(messages):
            self._lines.setdefault(message.group or place, deque()).append(place)

    @property
    def heads(self) -> list[int]:
        """The places of the messages that may be sent now."""
        return [line[0] for line in self._lines.values()]

    def confirm(self, place: int) -> int | None:
        """The broker has the message there; the place of the next one of its line, if there is one.

        Args:
            place: of the first message of a line.
        """
        line = self._lines[self._name(place)]
        line.popleft()
        if line:
            return line[0]
        del self._lines[self._name(place)]
        return None

    def fail(self, place: int, error: Exception) -> None:
        """The message there is not sent, and none after it.

        Args:
            place: of the first message of a line.
            error: what is wrong with it.
        """
        for waiting in self._lines.pop(self._name(place)):
            self.answers[waiting] = error

    def give_up(self, error: Exception) -> None:
        """The broker is away: nothing more is sent, for now."""
        for place in self.heads:
            self.fail(place, away(error))

    def _name(self, place: int) -> str | int:
        return self.messages[place].group or place
