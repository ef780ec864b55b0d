"""The possible problems of a store's database, for the system checks."""

from __future__ import annotations

from collections.abc import Sequence

from django.core.checks import CheckMessage, Error, Warning  # noqa: A004  # Django's names
from django.db import connections


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
    atomic = [name for name, each in connections.settings.items() if each["ATOMIC_REQUESTS"]]
    if not atomic or using in atomic:
        return []
    return [
        Warning(
            f"ATOMIC_REQUESTS is on for {', '.join(map(repr, atomic))}, but the store {alias!r} "
            f"uses the database {using!r}.",
            hint=(
                "Effects in one database and their result in another do not commit together. "
                "After a crash between the two commits, a retry repeats the effects. Use the same "
                "database for the store and the effects."
            ),
            id="idempotency_django.W007",
        )
    ]
