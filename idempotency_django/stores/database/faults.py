"""What the errors of a database say."""

from __future__ import annotations

from enum import Enum


class Fault(Enum):
    """What an error of a database says."""

    TAKEN = "the key has got a row from another transaction"
    BUSY = "another transaction is in the way"
    ENDED = "the server ended the transaction, because it took too long"
    MISSING = "a table or a column does not exist"
    UNREACHABLE = "the connection is lost, or nothing can be written"
