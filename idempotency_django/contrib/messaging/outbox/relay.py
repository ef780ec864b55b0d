"""The relay: sends what was committed, outside of any transaction, and notes what was confirmed."""

from __future__ import annotations

import base64
import json
import logging
import threading
import time
import uuid
from collections.abc import Collection, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from operator import attrgetter
from typing import Any, Final

from django.db import Error as DatabaseFault
from django.db.models import Case, F, Q, QuerySet, Value, When

from ....backoff import Backoff
from ....models import DatabaseNow
from ..brokers.base import Batch as Sending
from ..brokers.base import BrokerUnavailable, Deferred, Outgoing, Publisher, Refused, unavailable
from ..databases import database, reason, unindexed, with_zone
from ..loops import handling, hanging, repeat
from ..models import MessageState, OutboxMessage
from ..queue import Queue, counted
from .publishing import insert, next_sequence, uuid7
from .topics import PUBLISHERS, Topic, topic, topics

BACKOFF: Final = Backoff(timedelta(seconds=1), timedelta(minutes=5))


class Outbox(Queue):
    """The queue of the outbox."""

    name = "outbox"
    model = OutboxMessage
    order = "sequence"
    place = "topic"
    since = "created_at"

    def over(self, older_than: timedelta) -> QuerySet[OutboxMessage]:
        no_window = Q(dedup_until=None) | Q(dedup_until__lte=DatabaseNow())
        return super().over(older_than).filter(no_window)

    def retry(self, row: OutboxMessage, by: str) -> dict[str, Any]:
        known = topic(row.topic)
        if known.path == PUBLISHERS["local"]:
            publisher: Any = known.publisher()
            publisher.release(outgoing(row), by)
        again = {"state": MessageState.PENDING, "process_after": DatabaseNow()}
        return {**again, "attempts": 0, "error": ""}

    def discard(self, row: OutboxMessage, by: str) -> dict[str, Any]:
        return {
            "state": MessageState.DISCARDED,
            "purge_at": DatabaseNow() + topic(row.topic).retention,
            "dedup": None,  # it keeps nothing else from being sent
            "dedup_until": None,
        }

    def repeat(self, row: OutboxMessage, by: str) -> dict[str, Any]:
        kept = ("topic", "stream", "type", "group", "payload", "is_base64", "caused_by")
        copy = OutboxMessage(
            **{name: getattr(row, name) for name in kept},
            message_id=uuid7(),
            sequence=next_sequence(row.stream) if row.stream else 0,
            process_after=DatabaseNow(),
            created_at=DatabaseNow(),
        )
        insert([copy])
        return {}


OUTBOX: Final = Outbox()


def outgoing(message: OutboxMessage) -> Outgoing:
    """The message, as a publisher gets it."""
    payload = message.payload
    return Outgoing(
        message_id=message.message_id,
        topic=message.topic,
        group=message.group,
        sequence=message.sequence,
        type=message.type,
        data=base64.b64decode(payload) if message.is_base64 else json.loads(payload),
        created_at=with_zone(message.created_at, database()),
        caused_by=message.caused_by,
    )


@dataclass(slots=True)
class Batch:
    """Messages that a relay may send until its lease is over.

    Attributes:
        token: the relay's, for this batch. A relay that was paused past its lease does not find it
            in the rows any more: it is fenced.
        messages: each stream's in their order; no other process sends messages of these streams.
    """

    token: str
    messages: Sequence[OutboxMessage]
    _settled: set[int] = field(default_factory=set)

    @classmethod
    def claim(cls, topics: Q, size: int, lease: timedelta) -> Batch:
        """Claim messages that are due: some of each group, in its order, and what has no group."""
        using, token = database(), uuid.uuid4().hex
        claimed = {"token": token, "process_after": DatabaseNow() + lease}
        wanted = OUTBOX.all(using).alias(to=unindexed(F("topic"))).filter(topics)
        # It comes before the token: MariaDB sets one column after the other.
        heads = OUTBOX.claim(wanted, size, {"error": _unsettled(), **claimed})
        groups = sum(bool(head.stream) for head in heads) or 1
        of_each = 1 + (size - len(heads)) // groups
        return cls(token, OUTBOX.rows(using, heads, claimed, of_each=of_each))

    def mark_sent(self, messages: Sequence[OutboxMessage], retention: timedelta) -> int:
        """Note that the broker has confirmed these; how many were still this relay's to note."""
        noted = OUTBOX.finish(
            self._owned(messages),
            messages,
            state=MessageState.DONE,
            sent_at=DatabaseNow(),
            purge_at=DatabaseNow() + retention,
            process_after=None,
            token="",
            error="",
        )
        self._settled.update(message.pk for message in messages)
        return noted

    def mark_failed(self, message: OutboxMessage, topic: Topic, error: Exception) -> MessageState:
        """Note that a message was refused, or has to wait; what the message is now."""
        is_refused = not isinstance(error, Deferred)
        delay = error.delay if isinstance(error, Deferred | Refused) else timedelta(0)
        attempts = message.attempts + is_refused
        is_final = isinstance(error, Refused) and error.final
        changes: dict[str, Any] = {"attempts": attempts, "token": "", "error": reason(error)}
        if is_refused and (is_final or attempts >= topic.max_attempts):
            changes |= {"state": MessageState.DEAD, "process_after": None}
        else:
            again = max(BACKOFF.jittered(attempts), delay)
            changes |= {"state": MessageState.PENDING, "process_after": DatabaseNow() + again}
        OUTBOX.finish(self._owned([message]), [message], **changes)
        self._settled.add(message.pk)
        return MessageState(changes["state"])

    def note_away(self, message: OutboxMessage, error: Exception) -> None:
        """Note why a message waits, which is not its fault."""
        self._owned([message]).update(error=reason(error))

    def release(self) -> None:
        """Let the next relay have what was not sent."""
        left = [message for message in self.messages if message.pk not in self._settled]
        if left:
            self._owned(left).update(token="", process_after=DatabaseNow())

    def _owned(self, messages: Iterable[OutboxMessage]) -> QuerySet[OutboxMessage]:
        rows = OutboxMessage.objects.using(database())
        pks = [message.pk for message in messages]
        owned = rows.alias(now=unindexed(F("state"))).filter(token=self.token, pk__in=pks)
        return owned.filter(now=MessageState.PENDING)


def _unsettled() -> Case:
    """The error of a message that is claimed, where the lease of the relay before has run out.

    Another relay may claim it each time, so nothing else says that it is sent again and again.
    """
    why = Value(
        "The lease of the relay that had claimed it was over before the relay could note what came "
        "of it. It died, or its publisher takes longer than the lease.",
        output_field=OutboxMessage._meta.get_field("error"),
    )
    return Case(When(token="", then=F("error")), default=why)


logger = logging.getLogger("idempotency_django")


@dataclass(slots=True)
class TopicSender:
    """Sends the messages of one topic for one relay, and waits during an outage of the broker."""

    name: str
    turn: float = 0  # when it was the topic's turn last, by time.monotonic()
    failures: int = 0  # how often in a row nothing could be sent
    resumes_at: float = 0  # by time.monotonic()
    publisher: Publisher | None = None

    def send(self, messages: Sequence[OutboxMessage], deadline: float) -> Sending:
        """Send messages; what has become of each, by its place."""
        self.turn = time.monotonic()
        sending = Sending([outgoing(message) for message in messages], deadline)
        try:
            if self.publisher is None:
                self.publisher = topic(self.name).publisher()
            self.publisher.publish(sending)
        except Exception as error:  # noqa: BLE001  # it says nothing of any message
            sending.end(unavailable(error))
        sending.refuse_unnoted(
            f"{type(self.publisher).__name__}.publish() has not noted what has become of the "
            "message. It must call batch.note() for each: with None if the broker has confirmed "
            "it, else with an exception."
        )
        return sending

    def pause(self, error: BrokerUnavailable) -> None:
        """Let the topic wait, longer each time; then the publisher creates a new client."""
        self.failures += 1
        wait = BACKOFF.jittered(self.failures).total_seconds()
        self.resumes_at = time.monotonic() + wait
        logger.error(
            "The topic %r waits for %.1f seconds, because the error affects all its messages: %s. "
            "No message is lost, and no attempt is counted.",
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


def _unit_of(message: OutboxMessage) -> str:
    """The unit of waiting: the message's group, or the message itself."""
    name: str = message.stream or message.message_id
    return name


def note_sent(batch: Batch, known: Topic, sent: Sequence[OutboxMessage]) -> None:
    """Note what the broker has confirmed."""
    if not sent:
        return
    noted = batch.mark_sent(sent, known.retention)
    if noted < len(sent):
        logger.warning(
            "The relay sent %s of the topic %r after its lease ended, so another relay may send "
            "the same messages. Consumers recognise duplicates by their id. Find out what takes "
            "the publisher so long.",
            counted(len(sent) - noted),
            known.name,
        )
    logger.info("Sent %s of the topic %r.", counted(len(sent)), known.name)


def note_failure(batch: Batch, known: Topic, message: OutboxMessage, error: Exception) -> None:
    """Note why a message was not sent, and has to wait."""
    state = batch.mark_failed(message, known, error)
    if state == MessageState.DEAD:
        logger.error(
            "The message %s of the topic %r is a dead letter after attempt %d%s. Fix the "
            "cause, and retry or discard it in the admin. The last error: %s",
            message.message_id,
            message.topic,
            message.attempts + 1,
            ", and its group waits" if message.stream else "",
            reason(error),
        )
    elif not isinstance(error, Deferred):
        logger.warning(
            "The message %s of the topic %r was refused: %s. It is sent again later.",
            message.message_id,
            message.topic,
            reason(error).rstrip("."),
        )


BATCH_SIZE: Final = 100
LEASE: Final = timedelta(seconds=60)
POLL: Final = timedelta(seconds=1)
BATCH_TIME: Final = timedelta(seconds=5)
"""The time after which a batch starts no further message, so that newly committed messages get
their turn."""


class Relay:
    """Sends the messages of the outbox. Any number of them may run, in any number of processes.

    Args:
        topics: the topics to send; by default all of ``IDEMPOTENCY["OUTBOX"]``.
        batch_size: the most messages to claim at once.
        lease: for how long. It begins nothing in the second half, nor after :data:`BATCH_TIME`, so
            that what was sent is noted within it; else another relay sends it as well.

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
    ) -> None:
        for name in topics:
            topic(name)
        self.topics = topics
        self.batch_size = batch_size
        self.lease = lease
        self.refused = 0
        self._senders: dict[str, TopicSender] = {}
        self._was_claimed = False

    def drain(self, stop: threading.Event | None = None) -> int:
        """Send until nothing is due, or ``stop`` is set; how many messages were tried."""
        log_abandoned()
        total = 0
        while not (stop and stop.is_set()):
            total += self.send_batch()
            if not self._was_claimed and not OUTBOX.revive(database()):
                break
        return total

    def work(self) -> bool:
        """Send a batch; whether there may be more to send."""
        self.send_batch()
        return self._was_claimed or OUTBOX.revive(database()) > 0

    def send_batch(self) -> int:
        """Claim what is due once, and send it; how many messages were tried."""
        deadline = time.monotonic() + min(BATCH_TIME, self.lease / 2).total_seconds()
        batch = Batch.claim(self._wanted(), self.batch_size, self.lease)
        self._was_claimed = bool(batch.messages)
        by_sender: dict[str, list[OutboxMessage]] = {}
        for message in batch.messages:
            by_sender.setdefault(message.topic, []).append(message)
        senders = [self._senders.setdefault(name, TopicSender(name)) for name in by_sender]
        try:
            # In turns: a slow topic may use up the time, and the others come first then.
            tried = 0
            for sender in sorted(senders, key=attrgetter("turn")):
                # Until it is noted what was sent: no other thread sends it in between.
                with handling(OUTBOX.name, sender.name, f"messages of the topic {sender.name!r}"):
                    tried += self._send(batch, sender, by_sender[sender.name], deadline)
            return tried
        finally:
            batch.release()

    def _send(
        self, batch: Batch, sender: TopicSender, messages: list[OutboxMessage], deadline: float
    ) -> int:
        if time.monotonic() >= deadline:
            return 0
        # What was not sent before, and its group, come last: the error may stop all others.
        failing = {_unit_of(message) for message in messages if message.error}
        messages.sort(key=lambda message: _unit_of(message) in failing)
        sending = sender.send(messages, deadline)
        if results := sending.results:
            known, sender.failures = topic(sender.name), 0
            note_sent(batch, known, [messages[at] for at, error in results.items() if not error])
            failures = {messages[at]: error for at, error in results.items() if error}
            self.refused += len(failures)
            for message, error in failures.items():
                note_failure(batch, known, message, error)
        if sending.outage:
            place, outage = sending.outage
            sender.pause(outage)
            batch.note_away(messages[place], outage)
        return len(results)

    def _wanted(self) -> Q:
        """The topics that this relay sends now."""
        now = time.monotonic()
        waiting = [name for name, sender in self._senders.items() if sender.resumes_at > now]
        return Q(to__in={*self.names} - {*waiting, *hanging(OUTBOX.name)})

    @property
    def names(self) -> Collection[str]:
        """The topics that it sends."""
        return self.topics or topics()

    @property
    def unreachable(self) -> list[str]:
        """The topics of which nothing could be sent when it was tried last."""
        return [name for name, sender in self._senders.items() if sender.failures]

    def close(self) -> None:
        """Leave the brokers."""
        for sender in self._senders.values():
            sender.close()
        self._senders.clear()


def run_relay(
    stop: threading.Event,
    relay: Relay | None = None,
    *,
    poll: timedelta = POLL,
    health: str = "",
) -> None:
    """Send messages as they are committed, until ``stop`` is set; then finish the batch.

    Args:
        stop: when to stop.
        relay: what sends them; by default a relay of all topics. It is closed at the end.
        poll: how long to wait when there was nothing to send.
        health: a file that is touched every second, unless a publisher hangs; empty: none.
    """
    relay = relay or Relay()
    with closing(relay):
        names = ", ".join(map(repr, relay.names))
        logger.info("The relay sends the topics %s, from the database %r.", names, database())
        log_abandoned()
        what = " ".join(["relay", *relay.topics])
        repeat(relay.work, stop, what=what, poll=poll, health=health)


def log_abandoned() -> None:
    """Log for which topics messages wait that no relay sends."""
    counts: dict[str, int] = {}
    with suppress(DatabaseFault):  # it is reported when messages are claimed
        counts = OUTBOX.unserved(database(), topics().__contains__)
    for name, count in counts.items():
        logger.error(
            "No relay sends the topic %r (%s waiting), because IDEMPOTENCY['OUTBOX'] lacks it. "
            "No message is lost. Add the topic again, with its publisher.",
            name,
            counted(count),
        )
