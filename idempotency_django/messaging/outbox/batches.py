"""What a relay has claimed, and what it writes down of it: no other relay sends it meanwhile."""

from __future__ import annotations

import base64
import json
import random
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from django.db import connections, transaction
from django.db.models import F, Q, QuerySet
from django.db.models.expressions import Combinable

from ...models import DatabaseNow
from ..databases import unindexed
from ..models import OutboxMessage
from ..models.outbox import OutboxState
from ..reasons import reason
from .publishers.base import Outgoing, Refused, SendLater
from .topics import BLOCK, Topic

FIRST_BACKOFF: Final = timedelta(seconds=1)
LONGEST_BACKOFF: Final = timedelta(minutes=5)


def backoff(failures: int) -> timedelta:
    """How long to wait after so many failures in a row; random, so that not all try at once."""
    longest: timedelta = min(FIRST_BACKOFF * 2 ** min(failures - 1, 20), LONGEST_BACKOFF)
    return longest * random.uniform(0.5, 1.0)  # noqa: S311  # nobody has to guess it


def due(using: str, topics: Q) -> QuerySet[OutboxMessage]:
    """The messages that are to be sent now."""
    return OutboxMessage.objects.using(using).filter(topics, process_after__lte=DatabaseNow())


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
        headers=json.loads(message.headers),
        created_at=message.created_at,
        caused_by=message.caused_by,
    )


@dataclass(slots=True)
class Batch:
    """Messages that a relay may send until its lease is over.

    Attributes:
        using: the alias of the database.
        token: the relay's, for this batch.
        messages: each stream's in their order.
        failed: the streams of which a message has failed; the later ones are not sent.
    """

    using: str
    token: str
    messages: Sequence[OutboxMessage]
    failed: set[str] = field(default_factory=set)

    def _owned(self, messages: Iterable[OutboxMessage]) -> QuerySet[OutboxMessage]:
        rows = OutboxMessage.objects.using(self.using)
        pks = [message.pk for message in messages]
        owned = rows.alias(now=unindexed(F("state"))).filter(self._mine(), pk__in=pks)
        return owned.filter(now=OutboxState.PENDING)

    def _mine(self) -> Q:
        raise NotImplementedError

    def mark_sent(self, messages: Sequence[OutboxMessage], retention: timedelta) -> int:
        """Note that the broker has confirmed these; how many were still this relay's to note."""
        return self._owned(messages).update(
            state=OutboxState.SENT,
            sent_at=DatabaseNow(),
            purge_at=DatabaseNow() + retention,
            process_after=None,
            token="",
            error="",
        )

    def mark_failed(self, message: OutboxMessage, topic: Topic, error: Exception) -> OutboxState:
        """Note that a message was refused, or has to wait; what the message is now."""
        is_refused = not isinstance(error, SendLater)
        delay = error.delay if isinstance(error, SendLater | Refused) else 0
        attempts = message.attempts + is_refused
        is_used_up = topic.max_attempts is not None and attempts >= topic.max_attempts
        is_final = isinstance(error, Refused) and error.final
        is_poison = is_refused and (is_used_up or is_final)
        if not is_poison:
            state = OutboxState.PENDING
        else:
            state = OutboxState.BLOCKED if topic.on_poison == BLOCK else OutboxState.SKIPPED
        skipped = state == OutboxState.SKIPPED
        # What was never sent keeps nothing else from being sent.
        forgotten = {"dedup": None, "dedup_until": None} if skipped else {}
        again = DatabaseNow() + max(backoff(attempts), timedelta(seconds=delay))
        with transaction.atomic(using=self.using):
            self._owned([message]).update(
                state=state,
                attempts=attempts,
                process_after=None if is_poison else again,
                purge_at=DatabaseNow() + topic.retention if skipped else None,
                token="",
                error=reason(error),
                **forgotten,
            )
            if not skipped:
                self.hold(message.stream, None if is_poison else again)
        return state

    def note_away(self, message: OutboxMessage, error: Exception) -> None:
        """Note why a message waits, which is not its fault."""
        self._owned([message]).update(error=reason(error))

    def hold(self, stream: str, until: Combinable | datetime | None) -> None:
        """Let nobody have the message's stream until then; without a stream, nothing waits."""

    def release(self) -> None:
        """Let the next relay have what was not sent."""
        raise NotImplementedError


class Unordered(Batch):
    """Messages without a group, each claimed by itself."""

    __slots__ = ()

    @classmethod
    def claim(cls, using: str, topics: Q, size: int, lease: timedelta) -> Batch:
        """Claim messages that are due."""
        token = uuid.uuid4().hex
        skip = connections[using].features.has_select_for_update_skip_locked
        with transaction.atomic(using=using):
            rows = due(using, topics).filter(group="").order_by("process_after")[:size]
            messages = list(rows.select_for_update(skip_locked=skip))
            if messages:
                claimed = OutboxMessage.objects.using(using).filter(
                    pk__in=[message.pk for message in messages]
                )
                claimed.update(token=token, process_after=DatabaseNow() + lease)
        return cls(using, token, messages)

    def _mine(self) -> Q:
        return Q(token=self.token)

    def release(self) -> None:
        self._owned(self.messages).update(token="", process_after=DatabaseNow())
