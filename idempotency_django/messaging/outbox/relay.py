"""The relay: sends what was committed, outside of any transaction, and notes what was confirmed."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Collection
from datetime import timedelta
from itertools import groupby
from operator import attrgetter
from typing import Final

from django.db import Error as DatabaseFault
from django.db import InterfaceError, OperationalError, close_old_connections, connections
from django.db.models import Count, Q

from ...conf import conf
from ..databases import database
from ..models import OutboxMessage
from ..models.outbox import OutboxState
from .batches import OF_A_GROUP, Batch
from .publishers.base import Away, NotBegun
from .sending import Line, note_failures, whose
from .topics import ALL_OTHERS, Topic, relayed, topic, topics
from .waking import Ear

logger = logging.getLogger("idempotency_django")

BATCH_SIZE: Final = 100
LEASE: Final = timedelta(seconds=60)
POLL: Final = timedelta(seconds=1)
LOOK: Final = timedelta(minutes=5)
"""How often a relay looks for messages that no relay sends."""
MOST_NAMED: Final = 20
TURN: Final = timedelta(seconds=5)
"""After so long, a batch begins nothing: what was committed meanwhile has its turn."""
QUICK: Final = timedelta(seconds=0.5)
"""After a batch that took no longer, the next one has twice as many messages of each group."""


class Relay:
    """Sends the messages of the outbox. Any number of them may run, in any number of processes.

    Args:
        topics: the topics to send; by default all of ``IDEMPOTENCY["OUTBOX"]``.
        batch_size: the most messages to claim at once.
        lease: for how long. It begins nothing in the second half, nor after :data:`TURN`, so that
            what was sent is noted within it; else another relay sends it as well.
        using: the alias of the database; by default ``IDEMPOTENCY["MESSAGING_DATABASE"]``.

    Attributes:
        refused: how many messages it has tried, and no broker has taken.

    Raises:
        ImproperlyConfigured: there is no such topic.
    """

    def __init__(
        self,
        topics: Collection[str] = (),
        *,
        batch_size: int = BATCH_SIZE,
        lease: timedelta = LEASE,
        using: str | None = None,
    ) -> None:
        for name in topics:
            topic(name)
        self.topics = topics
        self.batch_size = batch_size
        self.lease = lease
        self.using = using or database()
        self.refused = 0
        self._lines: dict[str, Line] = {}
        self._begun: dict[str, float] = {}  # each topic, when it had its turn
        self._of_a_group = OF_A_GROUP

    def run(self, stop: threading.Event, *, poll: timedelta = POLL, listen: bool = False) -> None:
        """Send whatever comes, until ``stop`` is set; then finish the batch.

        Args:
            stop: when to stop.
            poll: how long to wait when there was nothing to send.
            listen: whether to be woken up by topics with ``NOTIFY`` (PostgreSQL).
        """
        ear = Ear(self.using) if listen else None
        logger.info("The relay sends %s, from the database %r.", self.names, self.using)
        looked, was_busy = -math.inf, True
        try:
            while not stop.is_set():
                close_old_connections()
                if time.monotonic() - looked > LOOK.total_seconds():
                    looked = time.monotonic()
                    self._say_abandoned()
                if self._kept_up():
                    was_busy = True
                    continue
                if was_busy:
                    away = ", ".join(map(repr, self.unreachable))
                    also = f". It cannot send now: {away}" if away else ""
                    logger.info("The relay waits, because nothing is due%s.", also)
                    was_busy = False
                if ear is None:
                    stop.wait(poll.total_seconds())
                else:
                    ear.wait(poll.total_seconds(), stop)
        finally:
            if ear is not None:
                ear.close()

    def _kept_up(self) -> bool:
        """Whether something was sent; what goes wrong with the database is logged."""
        try:
            return self.send_batch() > 0
        except DatabaseFault:
            logger.exception(
                "The outbox cannot reach the database %r. No message is lost; the relay tries "
                "again.",
                self.using,
            )
            return False

    def _say_abandoned(self) -> None:
        try:
            for name, count in abandoned(self.using).items():
                logger.error(
                    "%d messages wait for the topic %r, and no relay sends them: "
                    "IDEMPOTENCY['OUTBOX'] does not name it any more, or has it with RELAY=False. "
                    "None is lost. Add the topic again, with a publisher that sends them to where "
                    "they are to go.",
                    count,
                    name,
                )
        except DatabaseFault:  # send_batch() says it
            return

    def drain(self, stop: threading.Event | None = None) -> int:
        """Send until nothing is due, or ``stop`` is set; how many messages were tried."""
        self._say_abandoned()
        total = 0
        while not (stop and stop.is_set()) and (sent := self.send_batch()):
            total += sent
        return total

    def send_batch(self) -> int:
        """Claim what is due once, and send it; how many messages were tried."""
        begun = time.monotonic()
        until = begun + min(TURN, self.lease / 2).total_seconds()
        wanted, of_a_group = self._wanted(), self._of_a_group
        batch = Batch.claim(self.using, wanted, self.batch_size, self.lease, of_a_group)
        by_topic = attrgetter("topic")
        groups = groupby(sorted(batch.messages, key=by_topic), key=by_topic)
        messages = {name: list(group) for name, group in groups}
        # In turns: a slow topic may use up the time, and the others come first then.
        turns = sorted(messages, key=lambda name: self._begun.get(name, 0))
        try:
            return sum(self._publish(batch, name, messages[name], until) for name in turns)
        finally:
            batch.release()
            is_quick = time.monotonic() - begun <= QUICK.total_seconds()
            self._of_a_group = min(2 * of_a_group, self.batch_size) if is_quick else OF_A_GROUP

    @property
    def names(self) -> str:
        """The topics that it sends, in words."""
        if not self.topics and ALL_OTHERS in conf.outbox:
            return "all topics"
        return f"the topics {', '.join(map(repr, self.topics or relayed()))}"

    @property
    def unreachable(self) -> list[str]:
        """The topics of which nothing could be sent when it was tried last."""
        return [name for name, line in self._lines.items() if line.failures]

    def close(self) -> None:
        """Leave the brokers."""
        for line in self._lines.values():
            line.close()
        self._lines.clear()

    def _publish(self, batch: Batch, name: str, messages: list[OutboxMessage], until: float) -> int:
        if time.monotonic() >= until:
            return 0
        self._begun[name] = time.monotonic()
        line = self._lines.setdefault(name, Line(name))
        messages.sort(key=lambda message: whose(message) in line.suspects)
        zipped = list(zip(messages, line.publish(messages, until), strict=True))
        answers = [each for each in zipped if not isinstance(each[1], Away | NotBegun)]
        if answers:
            line.failures = 0
            self._note(batch, topic(name), answers)
            line.suspects -= {whose(message) for message, error in answers if error is None}
        for message, error in zipped:
            if isinstance(error, Away):
                line.pause(error)
                line.suspects.add(whose(message))
                batch.note_away(message, error)
                break
        return len(answers)

    def _note(
        self, batch: Batch, known: Topic, answers: list[tuple[OutboxMessage, Exception | None]]
    ) -> None:
        sent = [message for message, error in answers if error is None]
        noted = self._mark_sent(batch, sent, known.retention) if sent else 0
        if noted < len(sent):
            logger.warning(
                "%d messages of the topic %r were sent after the lease of this relay was over. "
                "Another relay sends them as well; consumers recognise them by their ids. Give the "
                "relay a longer lease, or smaller batches.",
                len(sent) - noted,
                known.name,
            )
        if sent:
            logger.info("Sent %d messages of the topic %r.", len(sent), known.name)
        self.refused += len(answers) - len(sent)
        note_failures(batch, known, answers)

    def _mark_sent(self, batch: Batch, sent: list[OutboxMessage], retention: timedelta) -> int:
        try:
            return batch.mark_sent(sent, retention)
        except (InterfaceError, OperationalError):
            # The connection was lost while the broker was busy: on a new one, it is noted still.
            connections[self.using].close()
            return batch.mark_sent(sent, retention)

    def _wanted(self) -> Q:
        """The topics that this relay sends now."""
        now = time.monotonic()
        paused = [name for name, line in self._lines.items() if line.resumes_at > now]
        if not self.topics and ALL_OTHERS in conf.outbox:
            return ~Q(topic__in=[*paused, *_left()])
        return Q(topic__in=[name for name in self.topics or relayed() if name not in paused])


def abandoned(using: str) -> dict[str, int]:
    """How many messages wait for each topic that no relay sends, by its name."""
    wanted = ~Q(topic__in=_left()) if ALL_OTHERS in conf.outbox else Q(topic__in=relayed())
    waiting = OutboxMessage.objects.using(using).filter(~wanted, state=OutboxState.PENDING)
    counts = waiting.values("topic").order_by("topic").annotate(waiting=Count("pk"))
    return {each["topic"]: each["waiting"] for each in counts[:MOST_NAMED]}


def _left() -> list[str]:
    """The topics that others send."""
    return [name for name in topics() if name != ALL_OTHERS and name not in relayed()]
