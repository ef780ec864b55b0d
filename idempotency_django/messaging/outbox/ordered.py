"""Claims of a relay on streams: only their owner sends messages of these groups."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import groupby
from operator import attrgetter

from django.db import connections
from django.db.models import Exists, OuterRef, Q, QuerySet
from django.db.models.expressions import Combinable

from ...models import DatabaseNow
from ..databases import unindexed
from ..models import OutboxLease, OutboxMessage
from ..models.outbox import OutboxState
from .batches import Batch, due

_MOST_STREAMS = 200  # SQLite unites no more than 500 queries


class Ordered(Batch):
    """Messages of streams that are claimed: nobody else sends any message of them."""

    __slots__ = ()

    @classmethod
    def claim(cls, using: str, topics: Q, size: int, lease: timedelta) -> Batch:
        """Claim streams that have something due, and take the first messages of each."""
        token = uuid.uuid4().hex
        held = Q(expires_at=None) | Q(expires_at__gt=DatabaseNow())
        holding = OutboxLease.objects.using(using).filter(held, stream=OuterRef("stream"))
        waiting = due(using, topics).exclude(stream="").filter(~Exists(holding))
        oldest = waiting.order_by("process_after").values_list("stream", DatabaseNow())
        found = dict(oldest[: min(size, _MOST_STREAMS)])
        if not found:
            return cls(using, token, [])
        owned = _claim_streams(using, sorted(found), token, lease)  # in one order: no deadlock
        batch = cls(using, token, [])
        batch.messages = list(batch.sendable(_heads(using, owned, size), min(found.values())))
        if not batch.messages:
            batch.release()  # another relay was faster, and nobody must wait for this one's lease
        return batch

    def sendable(self, heads: list[OutboxMessage], now: datetime) -> Iterator[OutboxMessage]:
        """Those of the messages that nothing earlier in their streams keeps waiting."""
        for stream, messages in groupby(heads, key=attrgetter("stream")):
            for place, message in enumerate(messages):
                if message.process_after is None or message.process_after > now:
                    if place == 0:
                        self.hold(stream, message.process_after)
                    break
                yield message

    def hold(self, stream: str, until: Combinable | datetime | None) -> None:
        """Let no relay have the stream until then; ``None``: until an operator says so."""
        self._leases().filter(stream=stream).update(token="", expires_at=until)

    def release(self) -> None:
        self._leases().delete()

    def _mine(self) -> Q:
        return Q(Exists(self._leases().filter(stream=unindexed(OuterRef("stream")))))

    def _leases(self) -> QuerySet[OutboxLease]:
        return OutboxLease.objects.using(self.using).filter(token=self.token)


def _claim_streams(using: str, streams: list[str], token: str, lease: timedelta) -> list[str]:
    """Claim those of the streams that are free; which they are."""
    leases, ends = OutboxLease.objects.using(using), DatabaseNow() + lease
    rows = [OutboxLease(stream=stream, token=token, expires_at=ends) for stream in streams]
    leases.bulk_create(rows, ignore_conflicts=True)
    wanted = leases.filter(stream__in=streams)
    wanted.filter(expires_at__lte=DatabaseNow()).update(token=token, expires_at=ends)
    return sorted(wanted.filter(token=token).values_list("stream", flat=True))


def _heads(using: str, streams: list[str], size: int) -> list[OutboxMessage]:
    """The first messages of each stream, in their order: the same number of each."""
    if not streams:
        return []
    quote = connections[using].ops.quote_name
    head = (
        "SELECT * FROM (SELECT * FROM {table} WHERE {stream} = %s AND {state} = %s "
        "ORDER BY {sequence} LIMIT {most}) AS head"
    ).format(
        table=quote(OutboxMessage._meta.db_table),
        most=max(1, size // len(streams)),
        **{name: quote(name) for name in ("stream", "state", "sequence")},
    )
    parameters = [value for stream in streams for value in (stream, OutboxState.PENDING)]
    rows = OutboxMessage.objects.raw(
        " UNION ALL ".join([head] * len(streams)), parameters, using=using
    )
    return sorted(rows, key=attrgetter("stream", "sequence"))
