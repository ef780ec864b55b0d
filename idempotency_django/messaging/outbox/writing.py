"""The statements that write to the outbox, in the transaction of whoever publishes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

from django.db import IntegrityError, connections
from django.db.models import F, Q
from django.db.models.constants import OnConflict
from django.db.models.sql import InsertQuery

from ...models import DatabaseNow
from ..models import OutboxMessage, OutboxStream
from ..models.outbox import OutboxState
from .topics import Topic

_FIELDS: Final = [field for field in OutboxMessage._meta.concrete_fields if not field.primary_key]
_DUPLICATE: Final = 1062  # MariaDB's and MySQL's code for a unique index that has the value

# One statement, so that the first message of a group is like any other. MySQL has no RETURNING.
_NUMBER: Final = """
    INSERT INTO {table} ({stream}, {last}) VALUES (%(stream)s, %(count)s)
    ON CONFLICT ({stream}) DO UPDATE SET {last} = {table}.{last} + %(count)s RETURNING {last}
"""
_NUMBER_MYSQL: Final = """
    INSERT INTO {table} ({stream}, {last}) VALUES (%(stream)s, LAST_INSERT_ID(%(count)s))
    ON DUPLICATE KEY UPDATE {last} = LAST_INSERT_ID({last} + %(count)s)
"""


def schedule(known: Topic, delay: timedelta | None) -> dict[str, Any]:
    """The columns that say when a message is to be sent, or that no relay sends it.

    Raises:
        ValueError: it is to be delayed, and no relay sends it.
    """
    now = DatabaseNow()
    if known.relay:
        return {"process_after": now + delay if delay else now}
    if delay:
        raise ValueError(
            f"The topic {known.name!r} has no relay (RELAY), so nobody would wait. Leave out delay="
        )
    return {"state": OutboxState.LEFT, "purge_at": now + known.retention}


def insert(rows: Sequence[OutboxMessage], using: str) -> int:
    """Write messages, except those whose id or dedup id is there; how many were written.

    It waits for a transaction that is writing the same id. On MariaDB and MySQL, several rows must
    be new: there, what ignores a duplicate would ignore other errors, too.
    """
    if not rows:
        return 0
    size = connections[using].ops.bulk_batch_size(_FIELDS, [*rows]) or len(rows)
    return sum(_insert(rows[at : at + size], using) for at in range(0, len(rows), size))


def _insert(rows: Sequence[OutboxMessage], using: str) -> int:
    connection = connections[using]
    ignore = None if connection.vendor == "mysql" else OnConflict.IGNORE
    query = InsertQuery(OutboxMessage, on_conflict=ignore)
    query.insert_values(_FIELDS, [*rows])
    written = 0
    with connection.cursor() as cursor:
        for statement, parameters in query.get_compiler(using).as_sql():
            try:
                cursor.execute(statement, parameters)
            except IntegrityError as error:
                if ignore or getattr(error.__cause__, "args", (0,))[0] != _DUPLICATE:
                    raise
                return 0
            written += cursor.rowcount
    return written


def next_sequence(stream: str, using: str, count: int = 1) -> int:
    """The last of the next ``count`` numbers of a stream, which is locked until the commit."""
    connection = connections[using]
    is_mysql = connection.vendor == "mysql"
    quote = connection.ops.quote_name
    statement = (_NUMBER_MYSQL if is_mysql else _NUMBER).format(
        table=quote(OutboxStream._meta.db_table),
        stream=quote("stream"),
        last=quote("last_sequence"),
    )
    with connection.cursor() as cursor:
        cursor.execute(statement, {"stream": stream, "count": count})
        return int(cursor.lastrowid if is_mysql else cursor.fetchone()[0])


def take_back(stream: str, using: str) -> None:
    """Give the last number of a stream back, which this transaction has taken for nothing."""
    taken = OutboxStream.objects.using(using).filter(stream=stream)
    taken.update(last_sequence=F("last_sequence") - 1)


def end_window(dedup: str, using: str) -> None:
    """Let the next message have this dedup id, if the window of the last one is over."""
    over = OutboxMessage.objects.using(using).filter(dedup=dedup, dedup_until__lte=DatabaseNow())
    over.update(dedup=None)


def existing(row: OutboxMessage, using: str) -> OutboxMessage:
    """The message that kept this one from being written: it has its id, or its dedup id.

    Raises:
        IntegrityError: it has been purged since.
    """
    same = Q(message_id=row.message_id)
    if row.dedup:
        same |= Q(dedup=row.dedup)
    found = OutboxMessage.objects.using(using).filter(same)
    if connections[using].vendor == "mysql":
        found = (
            found.select_for_update()
        )  # a snapshot that is older than the message has no such row
    message = found.only("message_id", "topic", "type", "group", "payload", "is_base64").first()
    if message is None:
        raise IntegrityError(
            f"The message {row.message_id!r} was not written: one with its id was there, and was "
            "purged at this moment. Repeat the transaction."
        )
    return message
