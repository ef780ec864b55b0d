"""The possible problems of a store's database, for the system checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from django.core.checks import CheckMessage, Error, Warning  # noqa: A004  # Django's names
from django.db import connections, router
from django.db.models import Model
from django.utils.module_loading import import_string

from ...models import IdempotencyKey, IdempotencyStep

NOT_MIGRATED: Final = (
    "The tables of idempotency_django are missing from the database {using!r}, or older than "
    "the code. Run: manage.py migrate idempotency_django --database {using}"
)

READ_ONLY: Final = {
    "postgresql": "SELECT pg_is_in_recovery()",
    "mysql": "SELECT @@global.read_only",
}
"""Whether a server takes no writes, because it is a standby."""


def check_database(alias: str, using: str) -> Sequence[CheckMessage]:
    """The problems of keeping the records of store ``alias`` in the database ``using``."""
    if using not in connections.settings:
        return [
            Error(
                f"The store {alias!r} uses the database {using!r}, which is not in DATABASES.",
                hint=f"DATABASES has: {', '.join(map(repr, connections.settings))}.",
                id="idempotency_django.E003",
            )
        ]
    return [
        *_replica(alias, using),
        *_autocommit(alias, using),
        *_sqlite(alias, using),
        *_isolation(alias, using),
        *_atomic_requests(alias, using),
    ]


def _replica(alias: str, using: str) -> Iterator[CheckMessage]:
    writes = router.db_for_write(IdempotencyKey)
    if connections.settings[using].get("TEST", {}).get("MIRROR") or (
        writes != using and router.db_for_read(IdempotencyKey) == using
    ):
        yield Error(
            f"The store {alias!r} uses the database {using!r}, which looks like a replica.",
            hint=(
                "A replica lags behind, so a retry could be executed again. Set the store's using "
                f"to the primary database ({writes!r})."
            ),
            id="idempotency_django.E005",
        )


def _autocommit(alias: str, using: str) -> Iterator[CheckMessage]:
    if not connections.settings[using]["AUTOCOMMIT"]:
        yield Error(
            f"The store {alias!r} uses the database {using!r}, which has AUTOCOMMIT off.",
            hint=(
                "Nothing is committed there without a call of commit(), so requests with a key "
                f"are refused. Remove AUTOCOMMIT from DATABASES[{using!r}]."
            ),
            id="idempotency_django.E027",
        )


def _sqlite(alias: str, using: str) -> Iterator[CheckMessage]:
    connection = connections[using]
    mode = str(connection.settings_dict.get("OPTIONS", {}).get("transaction_mode") or "")
    if connection.vendor == "sqlite" and mode.upper() not in ("IMMEDIATE", "EXCLUSIVE"):
        yield Warning(
            f"The store {alias!r} uses the SQLite database {using!r} without "
            "transaction_mode IMMEDIATE.",
            hint=(
                "Without it, a transaction that reads before it writes fails at once with "
                "'database is locked' while another one writes. Set "
                f"DATABASES[{using!r}]['OPTIONS']['transaction_mode'] = 'IMMEDIATE'."
            ),
            id="idempotency_django.W006",
        )


def _isolation(alias: str, using: str) -> Iterator[CheckMessage]:
    connection = connections[using]
    level = connection.settings_dict.get("OPTIONS", {}).get("isolation_level")
    if connection.vendor != "postgresql" or level is None:
        return
    # By its path, because it needs a driver, and drivers number the levels differently.
    levels = import_string("django.db.backends.postgresql.psycopg_any.IsolationLevel")
    if level in (levels.REPEATABLE_READ, levels.SERIALIZABLE):
        yield Warning(
            f"The store {alias!r} uses the database {using!r} with an isolation level above READ "
            "COMMITTED.",
            hint=(
                "In this isolation level, a step that takes longer than a third of its lease "
                "cannot commit, and duplicates get 409 (in progress) more often. Use PostgreSQL's "
                "default isolation level."
            ),
            id="idempotency_django.W021",
        )


def _atomic_requests(alias: str, using: str) -> Iterator[CheckMessage]:
    atomic = [name for name, each in connections.settings.items() if each["ATOMIC_REQUESTS"]]
    if atomic and using not in atomic:
        yield Warning(
            f"ATOMIC_REQUESTS is on for {', '.join(map(repr, atomic))}, but the store {alias!r} "
            f"uses the database {using!r}.",
            hint=(
                "Effects in one database and their result in another do not commit together. "
                "After a crash between the two commits, a retry repeats the effects. Use the same "
                "database for the store and the effects."
            ),
            id="idempotency_django.W007",
        )


def check_writable(alias: str, using: str) -> Sequence[CheckMessage]:
    """Ask the database itself whether it can be written to."""
    question = READ_ONLY.get(connections[using].vendor)
    if question is None:
        return []
    with connections[using].cursor() as cursor:
        cursor.execute(question)
        row = cursor.fetchone()
    if not row or row[0] in (False, 0, "OFF"):
        return []
    return [
        Error(
            f"The store {alias!r} uses the database {using!r}, which is read-only, like a replica.",
            hint="Set the store's using to the primary database.",
            id="idempotency_django.E005",
        )
    ]


def check_migrated(alias: str, using: str) -> Iterator[CheckMessage]:
    """Ask the database itself whether it has the tables, and all of their columns.

    It is a warning and no error, because commands of the project that call for this check may have
    to run before ``migrate`` has.
    """
    missing = list(missing_tables(using, IdempotencyKey, IdempotencyStep))
    if missing:
        yield Warning(
            f"The store {alias!r} uses the database {using!r}, which lacks {', '.join(missing)}.",
            hint=f"Run: manage.py migrate idempotency_django --database {using}",
            id="idempotency_django.W028",
        )


def missing_tables(using: str, *models: type[Model]) -> Iterator[str]:
    """The tables of the models, or columns of them, that the database lacks."""
    connection = connections[using]
    inspect = connection.introspection
    with connection.cursor() as cursor:
        tables = set(inspect.table_names(cursor))
        for model in models:
            table = model._meta.db_table
            if table not in tables:
                yield f"the table {table}"
                continue
            columns = {each.name for each in inspect.get_table_description(cursor, table)}
            for field in model._meta.concrete_fields:
                if field.column not in columns:
                    yield f"the column {field.column} of {table}"
