"""The database that the tables of messaging are read from and written to."""

from __future__ import annotations

from typing import Final

from django.db import connections
from django.db.models import CharField, F, OuterRef, Value
from django.db.models.functions import Concat

from ...engine import describe_error
from ...stores import plain
from .conf import conf


def database() -> str:
    """The alias that ``IDEMPOTENCY["MESSAGING_DATABASE"]`` names; by default ``"default"``.

    Every query goes to it, never to where a router sends reads: a replica may lag behind.
    """
    return conf.messaging_database


def close_lost_connections() -> None:
    """Close connections that are lost or too old, as Django does before a request.

    One in a transaction stays, as in a test: what was written in it would be lost.
    """
    for connection in connections.all(initialized_only=True):
        if not connection.in_atomic_block:
            connection.close_if_unusable_or_obsolete()


def unindexed(column: F | OuterRef) -> Concat:
    """The text of a column, for which no index is used.

    PostgreSQL takes a value for rare that its statistics do not know yet. It then prefers the index
    of that column to a better one, and reads all the rows that have the value.
    """
    return Concat(column, Value(""), output_field=CharField())


LONGEST: Final = 4000  # characters


def reason(error: BaseException) -> str:
    """The error as a text that a table can keep, although it may quote what a stranger has sent."""
    return plain(describe_error(error), LONGEST)
