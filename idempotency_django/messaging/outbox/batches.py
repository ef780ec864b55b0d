"""What a relay has claimed, and what it writes down of it: no other relay sends it meanwhile."""

from __future__ import annotations

import base64
import json
import random
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from django.db import transaction
from django.db.models import F, Q, QuerySet

from ...models import DatabaseNow
from ..databases import database, unindexed, with_zone
from ..models import OutboxMessage
from ..models.outbox import OutboxState
from ..queue import Queue
from ..reasons import reason
from .publishers.base import Outgoing, Refused, SendLater
from .topics import BLOCK, Topic

FIRST_BACKOFF: Final = timedelta(seconds=1)
LONGEST_BACKOFF: Final = timedelta(minutes=5)
OF_A_GROUP: Final = 10
"""How many messages of one group a batch has, unless they are sent quickly: the groups take turns,
so a slow one keeps another waiting for so many of its messages, whatever its backlog."""

OUTBOX: Final = Queue(OutboxMessage, ("stream",), "sequence", OutboxState.BLOCKED)


def backoff(failures: int) -> timedelta:
    """How long to wait after so many failures in a row; random, so that not all try at once."""
    longest: timedelta = min(FIRST_BACKOFF * 2 ** min(failures - 1, 20), LONGEST_BACKOFF)
    return longest * random.uniform(0.5, 1.0)  # noqa: S311  # nobody has to guess it


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
        created_at=with_zone(message.created_at, message._state.db or database()),
        caused_by=message.caused_by,
    )


@dataclass(slots=True)
class Batch:
    """Messages that a relay may send until its lease is over.

    Attributes:
        using: the alias of the database.
        token: the relay's, for this batch. A relay that was paused past its lease does not find it
            in the rows any more: it is fenced.
        messages: each stream's in their order; nobody else sends any message of these streams.
        failed: the streams of which a message has failed; the later ones are not sent.
    """

    using: str
    token: str
    messages: Sequence[OutboxMessage]
    failed: set[str] = field(default_factory=set)
    _settled: set[int] = field(default_factory=set)

    @classmethod
    def claim(
        cls, using: str, topics: Q, size: int, lease: timedelta, of_a_group: int = OF_A_GROUP
    ) -> Batch:
        """Claim messages that are due: some of each group, in its order, and what has no group."""
        token = uuid.uuid4().hex
        claimed = {"token": token, "process_after": DatabaseNow() + lease}
        heads = OUTBOX.claim(OutboxMessage.objects.using(using).filter(topics), size, claimed)
        groups = sum(head.is_grouped for head in heads) or 1
        of_each = min(of_a_group, 1 + (size - len(heads)) // groups)
        return cls(using, token, OUTBOX.rows(using, heads, claimed, of_each=of_each))

    def mark_sent(self, messages: Sequence[OutboxMessage], retention: timedelta) -> int:
        """Note that the broker has confirmed these; how many were still this relay's to note."""
        with transaction.atomic(using=self.using):
            noted = self._owned(messages).update(
                state=OutboxState.SENT,
                sent_at=DatabaseNow(),
                purge_at=DatabaseNow() + retention,
                process_after=None,
                token="",
                error="",
            )
            OUTBOX.promote(self.using, {(each.stream,) for each in messages if each.stream})
        self._settled.update(message.pk for message in messages)
        return noted

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
            if skipped and message.stream:
                OUTBOX.promote(self.using, [(message.stream,)])
        self._settled.add(message.pk)
        return state

    def note_away(self, message: OutboxMessage, error: Exception) -> None:
        """Note why a message waits, which is not its fault."""
        self._owned([message]).update(error=reason(error))

    def release(self) -> None:
        """Let the next relay have what was not sent."""
        left = [message for message in self.messages if message.pk not in self._settled]
        if left:
            self._owned(left).update(token="", process_after=DatabaseNow())

    def _owned(self, messages: Iterable[OutboxMessage]) -> QuerySet[OutboxMessage]:
        rows = OutboxMessage.objects.using(self.using)
        pks = [message.pk for message in messages]
        owned = rows.alias(now=unindexed(F("state"))).filter(token=self.token, pk__in=pks)
        return owned.filter(now=OutboxState.PENDING)
