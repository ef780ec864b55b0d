"""Errors of a handler that have their cause in the transaction around it, explained."""

from __future__ import annotations

from typing import Final

from django.core.exceptions import ImproperlyConfigured
from django.db import Error as DatabaseFault
from django.db import connections, transaction

from ..errors import StoreUnavailable
from ..errors.operations import ROLLED_BACK_MESSAGE
from .failures import text_of

_IN_A_BLOCK: Final = "when an 'atomic' block is active"
_DURABLE: Final = "A durable atomic block cannot be nested"
_FIRST: Final = (
    "must be called before any query",  # PostgreSQL
    "cannot run inside a transaction block",
    "Transaction characteristics can't be changed",  # MariaDB and MySQL
)


def explained(error: Exception, operation: str, using: str | None) -> Exception:
    """The error, or one that explains it if its cause is the transaction around the handler.

    Args:
        error: what the handler raised, or what followed from what it did.
        operation: the operation that it executes.
        using: the database of the transaction.
    """
    what = _reason(error, using)
    if not what:
        return _rolled_back(error) if isinstance(error, StoreUnavailable) else error
    better = ImproperlyConfigured(
        f"{what} within a transaction, and {operation} runs in one: its idempotency policy is "
        "transactional, so that its effects and its answer commit together. Do that outside the "
        "view, or give its policy mode='leased'. Under ATOMIC_REQUESTS, also mark the view with "
        "transaction.non_atomic_requests."
    )
    better.__cause__ = error
    return better


def _rolled_back(error: StoreUnavailable) -> StoreUnavailable:
    """The error, which does not say any more that nothing was executed."""
    if error.foreign or error.detail != error.default_detail:
        return error
    better = StoreUnavailable(ROLLED_BACK_MESSAGE)
    better.rolled_back, better.__cause__ = True, error
    return better


def _reason(error: Exception, using: str | None) -> str:
    """What the handler tried; empty if the transaction around it is not the cause."""
    if using is not None and connections[using].closed_in_transaction:
        return "The connection was closed (by close_old_connections()?), which cannot be done"
    if isinstance(error, RuntimeError) and _DURABLE in text_of(error):
        return "transaction.atomic(durable=True) cannot be used"
    if isinstance(error, transaction.TransactionManagementError) and _IN_A_BLOCK in text_of(error):
        return "commit(), rollback() and set_autocommit() cannot be called"
    if isinstance(error, DatabaseFault) and any(each in text_of(error) for each in _FIRST):
        return f"A statement was refused ({text_of(error)}), because it cannot be executed"
    return ""
