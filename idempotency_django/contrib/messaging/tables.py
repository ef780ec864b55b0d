"""Whether the tables of messaging are there: for the system checks, and for commands."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any, Final

from django.core.checks import CheckMessage, Warning  # noqa: A004  # Django's name
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, connections

from ...stores import missing_tables
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
    missing = ", ".join(missing_tables(using, *MODELS))
    text, hint = _LACKS.format(using=using, missing=missing), _HINT.format(using=using)
    return [Warning(text, hint=hint, id="idempotency_django.W028")] if missing else []


def refuse_unmigrated() -> None:
    """Refuse to start without the tables. An outage of the database is tolerated.

    Raises:
        ImproperlyConfigured: they are missing, or older than the code.
    """
    using = database()
    try:
        missing = ", ".join(missing_tables(using, *MODELS))
    except DatabaseError:
        return
    if missing:
        text, hint = _LACKS.format(using=using, missing=missing), _HINT.format(using=using)
        raise ImproperlyConfigured(f"{text} {hint}")
