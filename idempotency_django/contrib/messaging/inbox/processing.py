"""Handling what the inbox holds: in any number of processes, each message once."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.db import Error as DatabaseFault
from django.db.models import F

from ....backoff import Backoff
from ....conf import did_you_mean
from ....errors import FingerprintMismatch, OperationInProgress, StoreUnavailable
from ....models import DatabaseNow
from ....policy import INHERITED
from ..databases import close_lost_connections, database, reason, unindexed
from ..dead_letters import release
from ..errors import DeadLettered, UnknownEventType
from ..loops import handling, hanging, repeat
from ..models import InboxMessage, MessageState
from ..queue import Queue, counted
from .handling import (
    CONSUMER,
    NoReceiver,
    OwnRecord,
    expire,
    group_of,
    handling_of,
    known_sources,
    record_of,
)
from .receivers import receiver_of, stream_of


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
            release(record_of(row), by)
        return self._again()

    def discard(self, row: InboxMessage, by: str) -> dict[str, Any]:
        return {"state": MessageState.DISCARDED, "purge_at": purged(row)}

    def accept(self, row: InboxMessage, by: str) -> dict[str, Any]:
        group = group_of(row)
        accepted = {"is_suspect": False, "error": "", "group": group}
        return {**self._again(), **accepted, "stream": stream_of(row.source, group)}

    def repeat(self, row: InboxMessage, by: str) -> dict[str, Any]:
        release(record_of(row), by)  # where a dead letter was discarded
        expire(row)
        return self._again()

    def _again(self) -> dict[str, Any]:
        return {
            "state": MessageState.PENDING,
            "ended": F("attempts"),  # else the next one would count as interrupted
            "process_after": DatabaseNow(),
            "processed_at": None,
            "purge_at": None,
        }


INBOX: Final = Inbox()


def claim(sources: Collection[str], at_most: int) -> list[InboxMessage]:
    """Claim messages that are due, the longest due ones first, without waiting for locks.

    Of a group, it is the earliest one that is not done. The first message counts as begun; call
    :func:`begin` before the others. A claim lasts as long as the lease of the project's policy.
    After it the message is due again, and its row or record says whether it is still handled.

    Args:
        sources: of which sources; empty: of all.
        at_most: how many.
    """
    using = database()
    wanted = InboxMessage.objects.using(using).alias(of=unindexed(F("source")))
    wanted = wanted.exclude(of__in=hanging(INBOX.name))
    if sources:
        wanted = wanted.filter(of__in=sources)
    lease = INHERITED.resolved().lease
    changes = {"process_after": DatabaseNow() + lease}
    heads = INBOX.claim(wanted, at_most, changes, begun={"attempts": F("attempts") + 1})
    return INBOX.rows(using, heads, changes)


def begin(message: InboxMessage) -> bool:
    """Count an attempt; ``False``: another process has the message.

    It is committed before the handler runs, so that an attempt counts that ends with its process,
    and does not count for the messages that were claimed with it.
    """
    if not mark(message, attempts=F("attempts") + 1):
        return False
    message.attempts += 1
    return True


def give_back(messages: Sequence[InboxMessage]) -> None:
    """Let others have messages that were claimed, and not begun."""
    for message in messages:
        mark(message, process_after=DatabaseNow())


def mark(message: InboxMessage, **changes: Any) -> bool:
    """Change a message; ``False``: it has been claimed again or settled since, and is unchanged.

    When it is no longer pending, its group continues.
    """
    using = database()
    mine = InboxMessage.objects.using(using).filter(
        pk=message.pk, state=MessageState.PENDING, attempts=message.attempts
    )
    if changes.get("state") == MessageState.DEAD and message.stream:
        receiver = receiver_of(message.source)
        if receiver and not receiver.dead_letters_block_group:
            changes["stream"] = ""  # it holds up no other message, even after a retry
    return bool(INBOX.finish(mine, [message], **changes))


logger = logging.getLogger("idempotency_django")

BATCH: Final = 10
POLL: Final = timedelta(seconds=1)
BACKOFF: Final = Backoff(timedelta(seconds=5), timedelta(hours=1))
NO_HANDLER: Final = "There is no handler for its type."
IN_PROGRESS: Final = (
    "An attempt was still in progress when the lease of its claim was over. Its handler takes long "
    "or hangs, or its process died."
)
_REJECTED: Final = (DeadLettered, FingerprintMismatch, UnknownEventType)


@dataclass(frozen=True, slots=True)
class _Verdict:
    """The next state of a message after an attempt at it."""

    state: MessageState
    error: str = ""
    pause: float = 0.0  # seconds, where it stays pending
    is_unbegun: bool = False  # then it was no attempt


def process_due(
    *,
    sources: Collection[str] = (),
    batch: int = BATCH,
    stop: threading.Event | None = None,
) -> Counter[str]:
    """Handle what is due, until nothing is.

    Several processes may do so at a time. A message whose process dies is due again after the
    lease of the project's policy.

    Args:
        sources: handle messages of these sources only; empty: of all.
        batch: how many messages are claimed in one transaction.
        stop: when it is set, the message in hand is finished, and no other is begun.

    Returns:
        How many messages are in which state now. Those in ``"pending"`` are due again later.

    Raises:
        ImproperlyConfigured: a source has no receiver and no consumer.
    """
    _refuse_unknown(sources)
    stop, tally = stop or threading.Event(), Counter[str]()
    while not stop.is_set():
        close_lost_connections()  # drop connections that the database has closed
        if not process_batch(sources, batch, stop, tally):
            break
    return tally


def process_batch(
    sources: Collection[str], batch: int, stop: threading.Event, tally: Counter[str]
) -> bool:
    """Claim what is due once, and handle it; whether there may be more."""
    claimed = claim(sources, batch)
    for place, message in enumerate(claimed):
        if stop.is_set():
            if place == 0:
                mark(message, attempts=F("attempts") - 1, process_after=DatabaseNow())
            give_back(claimed[max(place, 1) :])
            break
        if place and not begin(message):
            continue
        try:
            with handling(INBOX.name, message.source, f"the message {message}"):
                tally[str(process(message))] += 1
        except BaseException:
            with suppress(DatabaseFault):
                give_back(claimed[place + 1 :])  # it is not their fault
            raise
    return bool(claimed) or INBOX.revive(database()) > 0


def run_inbox(
    stop: threading.Event,
    *,
    sources: Collection[str] = (),
    batch: int = BATCH,
    poll: timedelta = POLL,
    health: str = "",
) -> None:
    """Handle what is due, and what becomes due, until the event is set.

    Args:
        stop: when it is set, the message in hand is finished.
        sources: as for :func:`process_due`.
        batch: as for :func:`process_due`.
        poll: how long to wait, when nothing is due, before looking again.
        health: a file that is touched every second, unless a handler hangs; empty: none.
    """
    _refuse_unknown(sources)
    warn_of_unhandled()

    def work() -> bool:
        return process_batch(sources, batch, stop, Counter())

    repeat(work, stop, what=" ".join(["inbox", *sources]), poll=poll, health=health)


def warn_of_unhandled() -> None:
    """Log which messages wait although there is nothing that could handle them."""
    known = known_sources()
    try:
        waiting = INBOX.unserved(database(), lambda source: source in known)
    except DatabaseFault:
        return  # it is reported when messages are claimed
    for source, number in waiting.items():
        logger.warning(
            "The inbox has %s of the source %r, but no WebhookReceiver and no consumer has that "
            "source. Add the receiver to the URLconf, or the consumer to "
            "IDEMPOTENCY['CONSUMERS']. If it was renamed, restore the old name.",
            counted(number),
            source,
        )


def _refuse_unknown(sources: Collection[str]) -> None:
    known = known_sources() if sources else []
    for source in sources:
        if source not in known:
            hint = did_you_mean(source, known, "There are") if known else "There are none."
            raise ImproperlyConfigured(
                f"No WebhookReceiver and no consumer has the source {source!r}, so no message "
                f"would be handled. {hint} A receiver must be in the URLconf. A consumer, as "
                f"{CONSUMER}NAME, must be in IDEMPOTENCY['CONSUMERS']."
            )


def process(message: InboxMessage) -> MessageState:
    """Handle a claimed message, and record the outcome."""
    own = OwnRecord(message, partial(mark, message), partial(purged, message))
    verdict = _verdict(message, own)
    changes: dict[str, Any] = {"state": verdict.state, "error": verdict.error}
    match verdict.state:
        case MessageState.PENDING if verdict.is_unbegun:
            changes |= {"attempts": F("attempts") - 1, "process_after": _after(verdict.pause)}
        case MessageState.PENDING:
            changes |= {"ended": F("attempts"), "process_after": _after(verdict.pause)}
        case MessageState.DEAD:
            changes |= {"ended": F("attempts"), "process_after": None}
        case MessageState.DONE if own.is_begun:
            return verdict.state  # it was committed with the handler
        case _:
            changes |= {"process_after": None, "processed_at": DatabaseNow()}
            changes["purge_at"] = purged(message)
    mark(message, **changes)
    return verdict.state


def _verdict(message: InboxMessage, own: OwnRecord) -> _Verdict:
    try:
        handle = handling_of(message, own)
        if handle is None:
            return _Verdict(MessageState.DISCARDED, NO_HANDLER)
        handle()
    except NoReceiver as error:
        logger.error("The message %s of the inbox waits: %s", message, error)  # noqa: TRY400  # it says all there is
        return _Verdict(MessageState.PENDING, str(error), _pause(message))
    except OperationInProgress as error:
        pause = error.remaining or 1.0
        if own.is_begun:
            return _Verdict(MessageState.PENDING, message.error, pause)
        return _Verdict(MessageState.PENDING, message.error or IN_PROGRESS, pause, is_unbegun=True)
    except _REJECTED as error:
        logger.exception("The message %s is a dead letter.", message)
        cause = error.__cause__
        why = reason(cause) if cause else message.error or reason(error)
        return _Verdict(MessageState.DEAD, why)
    except Exception as error:
        if own.is_committed():
            logger.exception(
                "The message %s was handled and committed, but an on_commit() callback of its "
                "handler failed. It is not handled again.",
                message,
            )
            return _Verdict(MessageState.DONE)
        pause = _pause(message)
        logger.exception(
            "The message %s was not handled (attempt %d). Another attempt follows in %.0f seconds.",
            message,
            message.attempts,
            pause,
        )
        is_unbegun = isinstance(error, StoreUnavailable) and not own.is_begun
        return _Verdict(MessageState.PENDING, reason(error), pause, is_unbegun)
    return _Verdict(MessageState.DONE)


def _after(seconds: float) -> Any:
    return DatabaseNow() + timedelta(seconds=seconds)


def _pause(message: InboxMessage) -> float:
    """Seconds until the next attempt."""
    return BACKOFF.jittered(message.attempts).total_seconds()


def purged(message: InboxMessage) -> Any:
    """When a message may be purged that is done or discarded now."""
    receiver = receiver_of(message.source)
    ttl = receiver.ttl if receiver else timedelta(days=7)
    return None if ttl is None else DatabaseNow() + ttl
