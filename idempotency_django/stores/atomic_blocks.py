"""The surroundings that must not affect a claim: open transactions, pools of connections."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.db import connections, transaction

IN_NINJA: Final = "In django-ninja, which ignores this mark, turn ATOMIC_REQUESTS off."
"""The end of the errors that advise ``transaction.non_atomic_requests``."""

SHARED: Final = ("pool", "isolation_level")
"""Options of a database that its other users need, but a heartbeat must not use."""


@contextmanager
def unpooled_connection(using: str, *, schema: object = None) -> Iterator[None]:
    """In the block, this thread has a connection of its own to the database, not from a pool.

    It sees what others have committed so far, at any isolation level.

    Args:
        using: the database.
        schema: the schema of a tenant, of django-tenants; ``None``: there are no tenants.
    """
    usual = connections[using]
    settings = dict(usual.settings_dict)
    settings["OPTIONS"] = {k: v for k, v in settings["OPTIONS"].items() if k not in SHARED}
    own: Any = type(usual)(settings, using)
    connections[using] = own
    if schema is not None:
        own.set_schema(schema)
    try:
        yield
    finally:
        connections[using] = usual
        own.close()


def is_open(using: str) -> bool:
    """Whether a transaction is open on the database; a test's, which stands for none, is not."""
    if not connections[using].in_atomic_block:
        return False
    try:
        with transaction.atomic(using=using, durable=True, savepoint=False):
            return False
    except RuntimeError:
        return True


def forbid_transactions(what: str) -> None:
    """Refuse a claim within a transaction, for a store that takes part in no transaction.

    The response would be there before the effects are committed, and stay if they roll back.

    Raises:
        ImproperlyConfigured: a transaction is open on some database.
    """
    for connection in connections.all(initialized_only=True):
        if is_open(connection.alias):
            raise ImproperlyConfigured(
                f"{what} is in a store without transactions, but a transaction is open on the "
                f"database {connection.alias!r}. If it rolls back, the result is stored without "
                "its effects. If it is a transaction.atomic(), move it inside. If it is "
                "ATOMIC_REQUESTS, mark the view with transaction.non_atomic_requests. "
                f"{IN_NINJA}"
            )
