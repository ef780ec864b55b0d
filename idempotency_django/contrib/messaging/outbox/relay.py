"""The relay: sends what was committed, outside of any transaction, and notes what was confirmed."""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from operator import attrgetter
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.db.models import Case, F, Q, QuerySet, Value, When
from django.utils.timezone import is_aware

from ....backoff import Backoff
from ....engine import Plan
from ....errors import OperationInProgress
from ....models import DatabaseNow, unlocked
from ....stores import reference
from .. import dead_letters
from ..brokers.base import Batch as Sending
from ..brokers.base import Publisher, Refused
from ..databases import database, reason, unindexed
from ..events import CAUSED_BY, Event
from ..loops import handling, hanging
from ..models import MessageState, OutboxMessage, OutboxStream
from ..queue import GroupQueue
from .publishing import write
from .topics import PUBLISHERS, Topic, topic, topics

BACKOFF: Final = Backoff(timedelta(seconds=1), timedelta(minutes=5))


class Outbox(GroupQueue):
    """The queue of the outbox."""

    name = "outbox"
    model = OutboxMessage
    place = "topic"
    since = "created_at"

    def retry(self, row: OutboxMessage, by: str) -> dict[str, Any]:
        for plan in _local_plans(row):
            dead_letters.release(plan, by)
        again = {"state": MessageState.PENDING, "process_after": DatabaseNow()}
        return {**again, "attempts": 0, "error": ""}

    def discard(self, row: OutboxMessage, by: str) -> dict[str, Any]:
        with suppress(ImproperlyConfigured, ValueError):  # its consumers are gone
            for plan in _local_plans(row):
                dead_letters.close(plan, by)
        return {
            "state": MessageState.DISCARDED,
            "purge_at": DatabaseNow() + topic(row.topic).retention,
            "dedup": None,  # it keeps nothing else from being sent
        }

    def repeat(self, row: OutboxMessage, by: str) -> dict[str, Any]:
        kept = ("topic", "stream", "type", "group", "payload", "caused_by")
        copied = {name: getattr(row, name) for name in kept}
        write(OutboxMessage(**copied, process_after=DatabaseNow(), created_at=DatabaseNow()))
        return {}

    def delete(self, rows: QuerySet[OutboxMessage]) -> int:
        """As :meth:`Queue.delete`. The number of a group goes with its last message.

        A number that a publisher has locked stays, for the message that it publishes.
        """
        grouped = {*rows.filter(stream__gt="").values_list("stream", flat=True)}
        deleted = super().delete(rows)
        numbers = OutboxStream.objects.using(rows.db)
        locked = {*unlocked(numbers.filter(pk__in=grouped)).values_list("pk", flat=True)}
        # Publishers wait for the locks from here on: what they have committed before is seen.
        left = self.all(rows.db).filter(stream__in=locked, stream__gt="")
        over = locked - {*left.values_list("stream", flat=True)}
        numbers.filter(pk__in=over).delete()
        return deleted


OUTBOX: Final = Outbox()


def _local_plans(row: OutboxMessage) -> Sequence[Plan]:
    """The operations of the consumers that a message of a local topic is handled by."""
    known = topic(row.topic)
    if known.path != PUBLISHERS["local"]:
        return []
    publisher: Any = known.publisher()
    plans: Sequence[Plan] = publisher.plans(event_of(row))
    return plans


def event_of(message: OutboxMessage) -> Event:
    """The message, as publishers and consumers get it; its source is a slash and the topic."""
    extensions: dict[str, str | int | bool] = {
        CAUSED_BY: reference(message.message_id, f"outbox:{message.topic}")
    }
    if message.group:
        extensions["sequence"] = message.sequence
    return Event(
        id=message.message_id,
        source=f"/{message.topic}",
        type=message.type,
        data=json.loads(message.payload),
        subject=message.group or None,
        time=message.created_at if is_aware(message.created_at) else None,  # by USE_TZ
        extensions=extensions,
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

    def mark_sent(self, messages: Sequence[OutboxMessage], retention: timedelta) -> None:
        """Note that the broker has confirmed these."""
        self._finish(
            messages,
            state=MessageState.DONE,
            sent_at=DatabaseNow(),
            purge_at=DatabaseNow() + retention,
            process_after=None,
            error="",
        )

    def mark_failed(self, message: OutboxMessage, topic: Topic, error: Exception) -> None:
        """Note that a message was refused, or has to wait."""
        attempts, delay = message.attempts + 1, timedelta(0)
        is_final = attempts >= topic.max_attempts
        if isinstance(error, OperationInProgress):  # no attempt has begun
            attempts, is_final = message.attempts, False
            delay = timedelta(seconds=error.remaining or 0)
        elif isinstance(error, Refused):
            delay, is_final = error.delay, is_final or error.final
        changes: dict[str, Any] = {"attempts": attempts, "error": reason(error)}
        if is_final:
            changes |= {"state": MessageState.DEAD, "process_after": None}
            logger.error(
                "The message %s of the topic %r is a dead letter after attempt %d%s. Fix the "
                "cause, and retry or discard it in the admin. The last error: %s",
                message.message_id,
                message.topic,
                attempts,
                ", and its group waits" if message.stream else "",
                changes["error"],
            )
        else:
            delay = max(delay, BACKOFF.jittered(attempts))
            changes["process_after"] = DatabaseNow() + delay
            logger.log(
                logging.INFO if isinstance(error, OperationInProgress) else logging.WARNING,
                "The message %s of the topic %r was not sent: %s. It is sent again later.",
                message.message_id,
                message.topic,
                changes["error"].rstrip("."),
            )
        self._finish([message], **changes)

    def note_outage(self, message: OutboxMessage, error: BaseException) -> None:
        """Note why a message waits, which is not its fault."""
        self._owned([message]).update(error=reason(error))

    def release(self) -> None:
        """Let the next relay have what was not sent."""
        self._owned(self.messages).update(token="", process_after=DatabaseNow())

    def _finish(self, messages: Sequence[OutboxMessage], **changes: Any) -> None:
        OUTBOX.finish(self._owned(messages), messages, token="", **changes)

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

    def send(self, sending: Sending) -> BaseException | None:
        """Send messages, and note what has become of each; the outage that has stopped it."""
        self.turn = time.monotonic()
        try:
            if self.publisher is None:
                self.publisher = topic(self.name).publisher()
            self.publisher.publish(sending)
        # Also where it exits: it would do so each time, and the other topics would never be sent.
        except (Exception, SystemExit) as error:  # noqa: BLE001  # it says nothing of any message
            self._pause(error, failures=1 if sending.results else self.failures + 1)
            return error
        self.failures = 0
        sending.refuse_unnoted(
            f"{type(self.publisher).__name__}.publish() has not noted what has become of the "
            "message. It must call batch.note() for each: with an error, unless the broker has "
            "confirmed it."
        )
        return None

    def _pause(self, error: BaseException, failures: int) -> None:
        """Let the topic wait, longer each time; then the publisher creates a new client."""
        self.failures = failures
        wait = BACKOFF.jittered(self.failures).total_seconds()
        self.resumes_at = time.monotonic() + wait
        logger.error(
            "The topic %r waits for %.1f seconds, because the error affects all its messages: %s. "
            "No message is lost, and no attempt is counted.",
            self.name,
            wait,
            reason(error).rstrip(" .:"),
            exc_info=error,
        )
        self.close()

    def close(self) -> None:
        """Leave the broker."""
        with suppress(Exception):  # the connection may be lost
            if self.publisher is not None:
                self.publisher.close()


BATCH_SIZE: Final = 100
LEASE: Final = timedelta(seconds=60)
BATCH_TIME: Final = timedelta(seconds=5)
"""The time after which a batch starts no further message, so that newly committed messages get
their turn."""


class Relay:
    """Sends the messages of the outbox. Any number of them may run, in any number of processes.

    Args:
        batch_size: the most messages to claim at once.
        lease: for how long. It begins nothing in the second half, nor after :data:`BATCH_TIME`, so
            that what was sent is noted within it; else another relay sends it as well.

    Attributes:
        tally: how many messages it has ``"sent"``, and how many times it ``"failed"`` to send one,
            or could not send a topic.
    """

    def __init__(self, *, batch_size: int = BATCH_SIZE, lease: timedelta = LEASE) -> None:
        self.batch_size = batch_size
        self.lease = lease
        self.tally = Counter[str]()
        self._senders: dict[str, TopicSender] = {}
        self._was_claimed = False

    def drain(self, stop: threading.Event | None = None) -> int:
        """Send until nothing is due, or ``stop`` is set; how many messages were tried."""
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
        self._was_claimed, tried = bool(batch.messages), 0
        by_topic: dict[str, list[OutboxMessage]] = {}
        for message in batch.messages:
            by_topic.setdefault(message.topic, []).append(message)
        senders = [self._senders.setdefault(name, TopicSender(name)) for name in by_topic]
        try:
            # In turns: a slow topic may use up the time, and the others come first then.
            for sender in sorted(senders, key=attrgetter("turn")):
                if time.monotonic() >= deadline:
                    break
                # Until it is noted what was sent: no other thread sends it in between.
                with handling(OUTBOX.name, sender.name, f"messages of the topic {sender.name!r}"):
                    tried += self._send(batch, sender, by_topic[sender.name], deadline)
        finally:
            if tried < len(batch.messages):
                batch.release()
        return tried

    def _send(
        self, batch: Batch, sender: TopicSender, messages: list[OutboxMessage], deadline: float
    ) -> int:
        # What was not sent before, and its group, come last: the error may stop all others.
        failing = {each.stream or each.pk for each in messages if each.error}
        messages.sort(key=lambda message: (message.stream or message.pk) in failing)
        sending = Sending([event_of(message) for message in messages], deadline)
        outage, results = sender.send(sending), sending.results
        if results:
            known = topic(sender.name)
            tried = [message for message in messages if message.message_id in results]
            if sent := [message for message in tried if results[message.message_id] is None]:
                batch.mark_sent(sent, known.retention)
            for message in tried:
                if error := results[message.message_id]:
                    batch.mark_failed(message, known, error)
            self.tally += Counter("failed" if error else "sent" for error in results.values())
        if outage:
            self.tally["failed"] += 1
            begun = [message for message in messages if message.message_id in sending.begun]
            batch.note_outage((begun or messages)[0], outage)
        return len(results)

    def _wanted(self) -> Q:
        """The topics that this relay sends now."""
        now = time.monotonic()
        waiting = [name for name, sender in self._senders.items() if sender.resumes_at > now]
        return Q(to__in={*topics()} - {*waiting, *hanging(OUTBOX.name)})

    def close(self) -> None:
        """Leave the brokers."""
        for sender in self._senders.values():
            sender.close()
        self._senders.clear()
