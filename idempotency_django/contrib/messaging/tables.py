"""Whether the tables of messaging are there: for the system checks, and for commands."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from typing import Any, Final

from django.core.checks import CheckMessage, Warning  # noqa: A004  # Django's name
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, connections

from .databases import database
from .models import Heartbeat, InboxMessage, OutboxMessage, OutboxStream, StreamPosition

MODELS: Final = (Heartbeat, InboxMessage, OutboxMessage, OutboxStream, StreamPosition)
_LACKS: Final = "The database {using!r} of messaging lacks {missing}."
_HINT: Final = "Run: manage.py migrate idempotency_messaging --database {using}"


def check_tables(databases: Collection[str] | None = None, **_: Any) -> list[CheckMessage]:
    """Ask the database itself whether it has the tables; ``migrate`` is about to make them."""
    try:
        using = database()
    except ImproperlyConfigured:
        return []  # check_settings reports it
    is_asked = using in (databases or ()) and using in connections
    if not is_asked or sys.argv[1:2] == ["migrate"]:
        return []
    missing = ", ".join(_missing(using))
    text, hint = _LACKS.format(using=using, missing=missing), _HINT.format(using=using)
    return [Warning(text, hint=hint, id="idempotency_django.W028")] if missing else []


def refuse_unmigrated() -> None:
    """Refuse to start without the tables. An outage of the database is tolerated.

    Raises:
        ImproperlyConfigured: they are missing, or older than the code.
    """
    using = database()
    try:
        missing = ", ".join(_missing(using))
    except DatabaseError:
        return
    if missing:
        text, hint = _LACKS.format(using=using, missing=missing), _HINT.format(using=using)
        raise ImproperlyConfigured(f"{text} {hint}")


def _missing(using: str) -> Iterator[str]:
    """The tables of the models, or columns of them, that the database lacks."""
    connection = connections[using]
    inspect = connection.introspection
    with connection.cursor() as cursor:
        tables = set(inspect.table_names(cursor))
        for model in MODELS:
            table = model._meta.db_table
            if table not in tables:
                yield f"the table {table}"
                continue
            columns = {each.name for each in inspect.get_table_description(cursor, table)}
            for field in model._meta.concrete_fields:
                if field.column not in columns:
                    yield f"the column {field.column} of {table}"
