"""One INSERT in a commit of its own: a message is durable, or is known to be there already."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.db import Error as DatabaseFault
from django.db import connections
from django.db.models import AutoField
from django.db.models.constants import OnConflict
from django.db.models.sql import InsertQuery

from ...errors import StoreUnavailable
from ...stores.atomic_blocks import is_open
from ..databases import database
from ..models import InboxMessage

T = TypeVar("T")

logger = logging.getLogger("idempotency_django")

RETRY_AFTER = 30
"""Seconds after which a sender may try again when the database cannot be reached."""

_COLUMNS = [
    field for field in InboxMessage._meta.concrete_fields if not isinstance(field, AutoField)
]


def insert(message: InboxMessage) -> bool:
    """Commit the message; ``False``: one with its source and id, or its unique digest, is there.

    Raises:
        StoreUnavailable: it is not known to be committed.
        ImproperlyConfigured: a transaction is open, with which it would be committed later.
    """
    return _done(_inserted, message)


def known_digest(message: InboxMessage) -> str | None:
    """The digest of the message that is there with this source and id; ``None``: there is none.

    Raises:
        StoreUnavailable: the database cannot be reached.
        ImproperlyConfigured: a transaction is open.
    """
    return _done(_known, message)


def _done(statement: Callable[[InboxMessage, str], T], message: InboxMessage) -> T:
    """What the statement returns, on a second connection if the first one is lost."""
    using = database()
    try:
        _refuse_transaction(using)
        try:
            return statement(message, using)
        except DatabaseFault:
            if not _is_lost(using):
                raise
            connections[using].close()  # the next one may work, and a second INSERT does no harm
            return statement(message, using)
    except DatabaseFault as error:
        logger.exception("A message of %s could not be stored.", message.source)
        raise StoreUnavailable(
            "The delivery could not be stored, because the database cannot be reached. Deliver it "
            "again later.",
            retry_after=RETRY_AFTER,
        ) from error


def _inserted(message: InboxMessage, using: str) -> bool:
    query = InsertQuery(InboxMessage, on_conflict=OnConflict.IGNORE)
    query.insert_values(_COLUMNS, [message])
    [(statement, parameters)] = query.get_compiler(using=using).as_sql()
    with connections[using].cursor() as cursor:
        cursor.execute(statement, parameters)
        return bool(cursor.rowcount)


def _known(message: InboxMessage, using: str) -> str | None:
    rows = InboxMessage.objects.using(using)
    same = rows.filter(source=message.source, message_id=message.message_id)
    return same.values_list("digest", flat=True).first()


def _is_lost(using: str) -> bool:
    """Whether there was a connection that nobody can use any more."""
    connection = connections[using]
    if connection.connection is None or connection.in_atomic_block:
        return False
    return not connection.is_usable()


def _refuse_transaction(using: str) -> None:
    connection = connections[using]
    if is_open(using) or not (connection.in_atomic_block or connection.get_autocommit()):
        raise ImproperlyConfigured(
            f"A message was to be stored within a transaction on the database {using!r}. The "
            "sender would be told that it is stored before it is committed. Do not put "
            "transaction.atomic() around a webhook's view, and do not set AUTOCOMMIT to False."
        )
