"""The system checks of the outbox."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from django.core.checks import CheckMessage, Error, Warning  # noqa: A004  # Django's name
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from ....stores import Store, stores
from ..conf import conf
from ..databases import database
from .topics import topic


def check_outbox(**_: Any) -> Sequence[CheckMessage]:
    """The topics of the outbox, and the database that it is in."""
    try:
        using = database()
        topics = list(conf.outbox)
    except ImproperlyConfigured:
        return []  # check_settings reports it
    return [*_database(using), *(found for name in topics for found in _topic(name))]


def _topic(name: str) -> Iterator[CheckMessage]:
    try:
        topic(name).publisher()
    except ImproperlyConfigured as error:
        yield Error(str(error), id="idempotency_django.E043")


def _database(using: str) -> Iterator[CheckMessage]:
    if using not in connections:
        yield Error(
            f"IDEMPOTENCY['MESSAGING_DATABASE'] is {using!r}, which is not in DATABASES.",
            hint="Use the alias of the database that your models are written to.",
            id="idempotency_django.E045",
        )
        return
    keeping = {store.using for store in _stores() if store.using}
    if conf.outbox and keeping and using not in keeping:
        names = ", ".join(map(repr, sorted(keeping)))
        yield Warning(
            f"Messages are in the database {using!r}, but records are in {names}.",
            hint=(
                "An effect, its record and its messages commit together only in one database. Use "
                "the same alias for IDEMPOTENCY['MESSAGING_DATABASE'] and the store's using."
            ),
            id="idempotency_django.W007",
        )


def _stores() -> Iterator[Store]:
    with suppress(ImproperlyConfigured):  # check_stores reports it
        yield from stores.all()
