"""The errors of a database, in the store's terms."""

from __future__ import annotations

from typing import NoReturn

from django.core.exceptions import ImproperlyConfigured
from django.db import Error as DatabaseFault
from django.db import InterfaceError, InternalError, OperationalError

from ...errors import OperationInProgress, StoreUnavailable
from .checks import NOT_MIGRATED
from .dialects import Dialect


def translated(dialect: Dialect, error: DatabaseFault, *, rolled_back: bool = False) -> Exception:
    """The store's error for one of the database's, if it has one; else that error.

    Args:
        dialect: knows what the error says.
        error: the database's.
        rolled_back: whether it is known that nothing was committed.
    """
    if dialect.is_missing(error):
        return ImproperlyConfigured(NOT_MIGRATED.format(using=dialect.using))
    rolled_back = rolled_back or dialect.has_ended(error)
    lost = isinstance(error, OperationalError | InterfaceError) or dialect.has_ended(error)
    if lost and dialect.is_busy(error):
        in_progress = OperationInProgress()
        in_progress.busy = dialect.locks_database
        return in_progress
    refused = isinstance(error, InternalError) and dialect.is_read_only(error)
    if lost or refused or dialect.is_gone(error):
        unavailable = StoreUnavailable()
        unavailable.rolled_back = rolled_back
        return unavailable
    return error


def raise_translated(dialect: Dialect, error: DatabaseFault) -> NoReturn:
    """Raise the store's error for one of the database's, if it has one; else that error."""
    better = translated(dialect, error)
    if better is error:
        raise error
    raise better from error
