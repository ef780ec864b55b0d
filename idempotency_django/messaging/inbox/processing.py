"""Handling what the inbox holds: in any number of processes, each message once."""

from __future__ import annotations

import logging
import random
import threading
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.db import Error as DatabaseFault
from django.db import close_old_connections, connections, transaction
from django.db.models import Count, F

from ...conf import did_you_mean
from ...errors import (
    FingerprintMismatch,
    MessageParked,
    OperationInProgress,
    StoreUnavailable,
    UnknownEventType,
)
from ...models import DatabaseNow
from ...policy import PROJECT_POLICY
from ..databases import database, unindexed
from ..models import InboxMessage, InboxState
from ..queue import Queue, counted, reason
from .receivers import CONSUMER, NobodyThere, handling_of, known_sources, receiver_of, receivers

INBOX: Final = Queue(InboxMessage, ("source", "group"), "id", InboxState.PARKED)


def claim(sources: Collection[str], at_most: int) -> list[InboxMessage]:
    """Claim messages that are due, the longest due ones first; nobody waits for anybody here.

    Of a group, it is the earliest one that is not done. A claim lasts as long as the lease of the
    project's policy. After it the message is due again, and its record says whether it is still
    being handled.

    Args:
        sources: of which sources; empty: of all.
        at_most: how many.
    """
    using = database()
    rows = InboxMessage.objects.using(using)
    wanted = rows.alias(of=unindexed(F("source"))).filter(of__in=sources) if sources else rows.all()
    lease = PROJECT_POLICY.resolved().lease
    changes = {"process_after": DatabaseNow() + lease, "attempts": F("attempts") + 1}
    known = receivers().items()
    passing = [source for source, each in known if not each[-1].parked_blocks_group]
    return INBOX.rows(using, INBOX.claim(wanted, at_most, changes, passing=passing), changes)


def give_back(messages: Sequence[InboxMessage]) -> None:
    """Let others have messages that were claimed, and not begun."""
    for message in messages:
        mark(message, process_after=DatabaseNow(), attempts=F("attempts") - 1)


def mark(message: InboxMessage, **changes: Any) -> bool:
    """Change a message; ``False``: it has been claimed again or settled since, and is unchanged.

    When it is not pending any more, its group goes on.
    """
    using = database()
    mine = InboxMessage.objects.using(using).filter(
        pk=message.pk, state=InboxState.PENDING, attempts=message.attempts
    )
    if not message.group or changes.get("state", InboxState.PENDING) == InboxState.PENDING:
        return bool(mine.update(**changes))
    with transaction.atomic(using=using):
        done = bool(mine.update(**changes))
        if done:
            INBOX.promote(using, [(message.source, message.group)])
    return done


logger = logging.getLogger("idempotency_django")

BATCH: Final = 10
POLL: Final = timedelta(seconds=1)
FIRST_PAUSE: Final = 5.0  # seconds after the first failure; each further one takes twice as long
LONGEST_PAUSE: Final = 3600.0  # seconds
_REJECTED: Final = (MessageParked, FingerprintMismatch, UnknownEventType)


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What becomes of a message after an attempt at it."""

    state: InboxState
    error: str = ""
    pause: float = 0.0  # seconds, where it stays pending


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
        How many messages are in which state now; ``"pending"``: they are due again later.

    Raises:
        ImproperlyConfigured: one of the sources is nobody's.
    """
    _refuse_unknown(sources)
    stop, tally = stop or threading.Event(), Counter[str]()
    while not stop.is_set():
        close_old_connections()  # those that the database has closed
        claimed = claim(sources, batch)
        if not claimed:
            break
        for place, message in enumerate(claimed):
            if stop.is_set():
                give_back(claimed[place:])
                break
            try:
                tally[str(process(message))] += 1
            except BaseException:
                with suppress(DatabaseFault):
                    give_back(claimed[place + 1 :])  # it is not their fault
                raise
    return tally


def run_inbox(
    stop: threading.Event,
    *,
    sources: Collection[str] = (),
    batch: int = BATCH,
    poll: timedelta = POLL,
) -> None:
    """Handle what is due, and what becomes due, until the event is set.

    Args:
        stop: when it is set, the message in hand is finished.
        sources: as for :func:`process_due`.
        batch: as for :func:`process_due`.
        poll: how long to wait, when nothing is due, before looking again.
    """
    while not stop.is_set():
        try:
            process_due(sources=sources, batch=batch, stop=stop)
        except (DatabaseFault, StoreUnavailable):
            logger.exception("The inbox cannot be processed now; another try follows.")
            connections.close_all()
        stop.wait(poll.total_seconds())


def warn_of_unhandled() -> None:
    """Log which messages wait although there is nothing that could handle them."""
    try:
        rows = InboxMessage.objects.using(database()).filter(
            state=InboxState.PENDING, process_after__isnull=False
        )
        found = rows.exclude(source__in=known_sources()).values_list("source")
        waiting = list(found.annotate(number=Count("pk")).order_by("source"))
    except DatabaseFault:
        return  # it is told of when messages are to be claimed
    for source, number in waiting:
        logger.warning(
            "The inbox has %s of the source %r to handle, but no WebhookReceiver and no consumer "
            "has that source. Put the receiver into the URLconf, or list the consumer in "
            "IDEMPOTENCY['CONSUMERS']. If it was renamed, give it its old name back.",
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
                f"would ever be handled. {hint} A receiver must be in the URLconf, and a consumer, "
                f"as {CONSUMER}NAME, in IDEMPOTENCY['CONSUMERS']."
            )


def process(message: InboxMessage) -> InboxState:
    """Handle a message that was claimed, and note what became of it."""
    verdict = _verdict(message)
    changes: dict[str, Any] = {"state": verdict.state, "error": verdict.error}
    match verdict.state:
        case InboxState.PENDING:
            changes["process_after"] = DatabaseNow() + timedelta(seconds=verdict.pause)
        case InboxState.PARKED:
            changes["process_after"] = None
        case _:
            changes |= {"process_after": None, "processed_at": DatabaseNow()}
            changes["purge_at"] = _purged(message)
    mark(message, **changes)
    return verdict.state


def _verdict(message: InboxMessage) -> _Verdict:
    try:
        handle = handling_of(message)
        if handle is None:
            return _Verdict(InboxState.IGNORED)
        handle()
    except NobodyThere as error:
        logger.error("The message %s of the inbox waits: %s", message, error)  # noqa: TRY400  # it says all there is
        return _Verdict(InboxState.PENDING, str(error), _pause(message))
    except OperationInProgress as error:
        return _Verdict(InboxState.PENDING, message.error, error.remaining or 1.0)
    except _REJECTED as error:
        logger.exception("The message %s is parked.", message)
        cause = error.__cause__
        why = reason(cause) if cause else message.error or reason(error)
        return _Verdict(InboxState.PARKED, why)
    except Exception as error:
        pause = _pause(message)
        logger.exception(
            "The message %s was not handled (attempt %d). Another attempt follows in %.0f seconds.",
            message,
            message.attempts,
            pause,
        )
        return _Verdict(InboxState.PENDING, reason(error), pause)
    return _Verdict(InboxState.HANDLED)


def _pause(message: InboxMessage) -> float:
    """Seconds until the next attempt: more after each, and not the same for two messages."""
    longest: float = min(FIRST_PAUSE * 2.0 ** min(message.attempts - 1, 20), LONGEST_PAUSE)
    return longest * random.uniform(0.5, 1)  # noqa: S311  # nobody gains by guessing it


def _purged(message: InboxMessage) -> Any:
    receiver = receiver_of(message.source)
    ttl = receiver.ttl if receiver else timedelta(days=7)
    return None if ttl is None else DatabaseNow() + ttl
