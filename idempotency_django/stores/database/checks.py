"""The possible problems of a store's database, for the system checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from django.core.checks import CheckMessage, Error, Warning  # noqa: A004  # Django's names
from django.db import connections

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
    return [*_sqlite(alias, using), *_atomic_requests(alias, using)]


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
