"""What the errors of a database say, and the store's own errors for them."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final, NoReturn

from django.core.exceptions import ImproperlyConfigured
from django.db import Error as DatabaseFault

from ...errors import OperationInProgress, StoreUnavailable
from .checks import NOT_MIGRATED

if TYPE_CHECKING:
    from .dialects.base import Dialect

REFUSED_MESSAGE: Final = (
    "The database could not commit because of a conflict with another transaction, and has "
    "rolled back. Retry later with the same key."
)


class Fault(Enum):
    """What an error of a database says."""

    TAKEN = "the key has got a row from another transaction"
    BUSY = "another transaction is in the way"
    ENDED = "the server ended the transaction, because it took too long"
    MISSING = "a table or a column does not exist"
    UNREACHABLE = "the connection is lost, or nothing can be written"


def translate_error(
    dialect: Dialect, error: DatabaseFault, *, rolled_back: bool = False
) -> Exception:
    """The store's error for one of the database's, if it has one; else that error.

    Args:
        dialect: knows what the error says.
        error: the database's.
        rolled_back: whether it is known that nothing was committed.
    """
    fault = dialect.fault(error)
    match fault:
        case Fault.MISSING:
            return ImproperlyConfigured(NOT_MIGRATED.format(using=dialect.using))
        case Fault.TAKEN:  # by a transaction that this one's snapshot cannot see
            return OperationInProgress(REFUSED_MESSAGE)
        case Fault.BUSY:
            in_progress = OperationInProgress()
            in_progress.busy = dialect.locks_database
            return in_progress
        case Fault.ENDED | Fault.UNREACHABLE:
            unavailable = StoreUnavailable()
            unavailable.rolled_back = rolled_back or fault is Fault.ENDED
            return unavailable
        case None:
            return error


def raise_translated(dialect: Dialect, error: DatabaseFault) -> NoReturn:
    """Raise the store's error for one of the database's, if it has one; else that error."""
    better = translate_error(dialect, error)
    if better is error:
        raise error
    raise better from error
