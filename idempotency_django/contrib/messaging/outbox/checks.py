"""The system checks of the outbox."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from django.core.checks import CheckMessage, Error, Warning  # noqa: A004  # Django's name
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from ....stores import Store, stores
from ..conf import conf
from ..databases import database
from .relay import LEASE
from .topics import ALL_OTHERS, Topic, topic


def check_outbox(**_: Any) -> Sequence[CheckMessage]:
    """The topics of the outbox, and the database that it is in."""
    try:
        using = database()
        topics = list(conf.outbox)
    except ImproperlyConfigured:
        return []  # check_settings reports it
    return [*_database(using), *(found for name in topics for found in _topic(name))]


def _topic(name: str) -> Iterator[CheckMessage]:
    name = "others" if name == ALL_OTHERS else name
    try:
        known = topic(name)
        known.publisher()
        yield from _timeout(known)
    except ImproperlyConfigured as error:
        yield Error(str(error), id="idempotency_django.E043")


def _timeout(known: Topic) -> Iterator[CheckMessage]:
    timeout, longest = known.options.get("timeout"), LEASE / 2
    if isinstance(timeout, timedelta) and timeout > longest:
        yield Warning(
            f"The publisher of the topic {known.name!r} has a timeout of "
            f"{timeout.total_seconds():g} seconds; a "
            f"relay's lease is {LEASE.total_seconds():g} seconds by default.",
            hint=(
                "A message that takes longer than half of the lease is sent twice. Use a timeout "
                f"of up to {longest.total_seconds():g} seconds; or give relay_outbox a --lease of "
                "two timeouts, and silence this warning."
            ),
            id="idempotency_django.W047",
        )


def _database(using: str) -> Iterator[CheckMessage]:
    if using not in connections:
        yield Error(
            f"IDEMPOTENCY['MESSAGING_DATABASE'] is {using!r}, which is not in DATABASES.",
            hint="Use the alias of the database that your models are written to.",
            id="idempotency_django.E045",
        )
        return
    if not connections[using].settings_dict["AUTOCOMMIT"]:
        yield Error(
            f"The database {using!r} of messaging has AUTOCOMMIT off.",
            hint="A relay could not commit. Remove AUTOCOMMIT.",
            id="idempotency_django.E045",
        )
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
