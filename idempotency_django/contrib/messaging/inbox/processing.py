"""Handling what the inbox holds: in any number of processes, each message once.

A message is handled as a consumer handles an event that its broker delivers again: the claim of its
record is committed first, so that an attempt counts that ends with its process. The record says
whether the message was handled. Its row only says when to look at it again.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter, deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

from django.db import Error as DatabaseFault
from django.db.models import F
from django.utils.datastructures import CaseInsensitiveMapping

from ....backoff import Backoff
from ....engine import Plan
from ....errors import FingerprintMismatch, OperationInProgress
from ....models import DatabaseNow, IdempotencyStep
from ....policy import INHERITED, keys
from ....stores import Status, reference
from ..conf import conf
from ..consumers import Consumer, consumers
from ..databases import close_lost_connections, database, reason, unindexed
from ..dead_letters import release, rows_of, sender_of
from ..errors import DeadLettered, UnknownEventType
from ..events import CAUSED_BY, Event
from ..loops import handling, hanging
from ..models import InboxMessage, MessageState
from ..queue import Queue
from .receivers import event_of, receiver_of, receivers, stream_of

CONSUMER: Final = "consumer:"
"""The prefix of the source of a consumer's dead letters."""


class NoReceiver(LookupError):
    """There is no receiver, or no consumer, for the source of a message."""


def known_sources() -> list[str]:
    """The sources whose messages can be handled: the receivers', and those of listed consumers."""
    names = consumers() if conf.consumers else ()
    return [*sorted(receivers()), *(f"{CONSUMER}{name}" for name in sorted(names))]


def handled_by(message: InboxMessage) -> tuple[Consumer, Event, str, str]:
    """Who handles the message: the consumer, its event and sender, and the key of its record.

    Raises:
        NoReceiver: there is no receiver or consumer for its source.
        ValueError: a consumer's dead letter is not an event.
    """
    headers, body = json.loads(message.headers), bytes(message.body)
    if message.source.startswith(CONSUMER):
        event = Event.from_json(body)
        name, listed = message.source.removeprefix(CONSUMER), consumers()
        if name not in listed:
            raise NoReceiver(
                f"No consumer is called {name!r}. List its path in IDEMPOTENCY['CONSUMERS']."
            )
        return listed[name], event, sender_of(headers), keys.fit(event.id)
    receiver = receiver_of(message.source)
    if receiver is None:
        raise NoReceiver(
            f"No WebhookReceiver has the source {message.source!r}. Check that it is in the "
            "URLconf and that its source was not renamed."
        )
    named: Any = CaseInsensitiveMapping(dict(headers))
    event = event_of(message.source, receiver.verifier.read(named, body))
    cause = reference(message.message_id, f"inbox:{message.source}")
    return receiver.consumer, replace(event, extensions={CAUSED_BY: cause}), "", message.message_id


def plan_of(message: InboxMessage) -> Plan:
    """The operation of the message; raises as :func:`handled_by`, or :exc:`UnknownEventType`."""
    consumer, event, sender, key = handled_by(message)
    return consumer.execution_of(event, sender, key=key).plan


class Inbox(Queue):
    """The queue of the inbox."""

    name = "inbox"
    model = InboxMessage
    order = "id"
    place = "source"
    since = "received_at"
    retried = (MessageState.DEAD, MessageState.PENDING)

    def retry(self, row: InboxMessage, by: str) -> dict[str, Any]:
        if row.state == MessageState.DEAD:  # else, its next attempt was to come anyway
            release(plan_of(row), by)
        return self._again()

    def discard(self, row: InboxMessage, by: str) -> dict[str, Any]:
        return {"state": MessageState.DISCARDED, "purge_at": purged(row)}

    def accept(self, row: InboxMessage, by: str) -> dict[str, Any]:
        stream = stream_of(row.source, row.group)
        return {**self._again(), "is_suspect": False, "error": "", "stream": stream}

    def repeat(self, row: InboxMessage, by: str) -> dict[str, Any]:
        plan = plan_of(row)
        release(plan, by)  # where a dead letter was discarded
        _forget(plan, by)
        return self._again()

    def _again(self) -> dict[str, Any]:
        return {
            "state": MessageState.PENDING,
            "process_after": DatabaseNow(),
            "processed_at": None,
            "purge_at": None,
        }


def _forget(plan: Plan, by: str) -> None:
    """Let the next attempt start from the beginning: no response is left, and no step."""
    completed = rows_of(plan).filter(status=Status.COMPLETED)
    IdempotencyStep.objects.using(completed.db).filter(record__in=completed).delete()
    completed.update(status=Status.FAILED, error=f"Reprocessed by {by}.")
    plan.store.forget(plan.operation.key, plan.operation.scope)


INBOX: Final = Inbox()

logger = logging.getLogger("idempotency_django")

BATCH: Final = 10
BACKOFF: Final = Backoff(timedelta(seconds=5), timedelta(hours=1))
NO_HANDLER: Final = "There is no handler for its type."
IN_PROGRESS: Final = (
    "An attempt was still in progress when the lease of its claim was over. Its handler takes long "
    "or hangs, or its process died."
)


def claim(at_most: int) -> list[InboxMessage]:
    """Claim messages that are due, the longest due ones first, without waiting for locks.

    Of a group, it is the earliest one that is not done. A claim lasts as long as the lease of the
    project's policy. After it the message is due again, and its record says whether it is still
    handled.
    """
    using = database()
    wanted = InboxMessage.objects.using(using).alias(of=unindexed(F("source")))
    wanted = wanted.exclude(of__in=hanging(INBOX.name))
    lease = INHERITED.resolved().lease
    changes = {"process_after": DatabaseNow() + lease, "attempts": F("attempts") + 1}
    heads = INBOX.claim(wanted, at_most, changes)
    return INBOX.rows(using, heads, changes)


def give_back(messages: Iterable[InboxMessage]) -> None:
    """Let others have messages that were claimed, and not begun."""
    for message in messages:
        mark(message, attempts=F("attempts") - 1, process_after=DatabaseNow())


def mark(message: InboxMessage, **changes: Any) -> bool:
    """Change a message; ``False``: it has been claimed again or settled since, and is unchanged.

    When it is no longer pending, its group continues.
    """
    mine = InboxMessage.objects.using(database()).filter(
        pk=message.pk, state=MessageState.PENDING, attempts=message.attempts
    )
    return bool(INBOX.finish(mine, [message], **changes))


def process_due(*, batch: int = BATCH, stop: threading.Event | None = None) -> Counter[str]:
    """Handle what is due, until nothing is.

    Several processes may do so at a time. A message whose process dies is due again after the
    lease of the project's policy.

    Args:
        batch: how many messages are claimed in one transaction.
        stop: when it is set, the message in hand is finished, and no other is begun.

    Returns:
        How many messages are in which state now. Those in ``"pending"`` are due again later.
    """
    stop, tally = stop or threading.Event(), Counter[str]()
    while not stop.is_set():
        close_lost_connections()  # drop connections that the database has closed
        if not process_batch(batch, stop, tally):
            break
    return tally


def process_batch(batch: int, stop: threading.Event, tally: Counter[str]) -> bool:
    """Claim what is due once, and handle it; whether there may be more."""
    claimed = claim(batch)
    left = deque(claimed)
    try:
        while left and not stop.is_set():
            message = left.popleft()
            with handling(INBOX.name, message.source, f"the message {message}"):
                tally[str(process(message))] += 1
    finally:
        with suppress(DatabaseFault):
            give_back(left)
    return bool(claimed) or INBOX.revive(database()) > 0


def process(message: InboxMessage) -> MessageState:
    """Handle a claimed message, and note what came of it; its state now."""
    try:
        consumer, event, sender, key = handled_by(message)
        consumer.execution_of(event, sender, key=key).run(claim_first=True)
    except NoReceiver as error:
        logger.error("The message %s of the inbox waits: %s", message, error)  # noqa: TRY400  # it says all there is
        return _again(message, str(error), _pause(message))
    except OperationInProgress as error:
        unbegun = {"attempts": F("attempts") - 1}
        return _again(message, message.error or IN_PROGRESS, error.remaining or 1.0, **unbegun)
    except UnknownEventType as error:
        if message.source.startswith(CONSUMER):
            return _dead(message, error)
        logger.info("The message %s was discarded: there is no handler for its type.", message)
        return _over(message, MessageState.DISCARDED, NO_HANDLER)
    except (DeadLettered, FingerprintMismatch) as error:
        return _dead(message, error)
    except Exception as error:
        pause = _pause(message)
        logger.exception(
            "The message %s was not handled (attempt %d). Another attempt follows in %.0f seconds.",
            message,
            message.attempts,
            pause,
        )
        return _again(message, reason(error), pause)
    return _over(message, MessageState.DONE)


def _again(message: InboxMessage, error: str, pause: float, **changes: Any) -> MessageState:
    """Look at the message again after that many seconds."""
    due = DatabaseNow() + timedelta(seconds=pause)
    mark(message, error=error, process_after=due, **changes)
    return MessageState.PENDING


def _dead(message: InboxMessage, error: Exception) -> MessageState:
    """No further attempt follows without an operator."""
    logger.error("The message %s is a dead letter.", message, exc_info=error)
    cause = error.__cause__
    why = reason(cause) if cause else message.error or reason(error)
    mark(message, state=MessageState.DEAD, error=why, process_after=None)
    return MessageState.DEAD


def _over(message: InboxMessage, state: MessageState, error: str = "") -> MessageState:
    """The message was handled, or is not to be."""
    over = {"state": state, "error": error, "process_after": None}
    mark(message, **over, processed_at=DatabaseNow(), purge_at=purged(message))
    return state


def _pause(message: InboxMessage) -> float:
    """Seconds until the next attempt."""
    return BACKOFF.jittered(message.attempts).total_seconds()


def purged(message: InboxMessage) -> Any:
    """When a message may be purged that is done or discarded now."""
    receiver = receiver_of(message.source)
    ttl = receiver.ttl if receiver else timedelta(days=7)
    return None if ttl is None else DatabaseNow() + ttl
