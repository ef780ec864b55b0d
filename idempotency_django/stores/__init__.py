"""The stores by alias: ``stores["default"]``, as in ``CACHES``; their contract, and what they keep.

What needs the models is imported at its first use."""

from typing import TYPE_CHECKING

from ..lazy import lazily
from .base import Store, stores
from .records import (
    Claim,
    Operation,
    Payload,
    Record,
    Status,
    Step,
    decode,
    derived_key,
    encode,
    is_reference,
    new_token,
    reference,
    referred,
)
from .transactions import forbid_atomic_block, forbid_transactions, is_open

if TYPE_CHECKING:
    from .database import DIALECTS, DatabaseStore
    from .dialects import plain
    from .postgresql import execute_first
    from .purging import purge, register_purge

__all__ = [
    "DIALECTS",
    "Claim",
    "DatabaseStore",
    "Operation",
    "Payload",
    "Record",
    "Status",
    "Step",
    "Store",
    "decode",
    "derived_key",
    "encode",
    "execute_first",
    "forbid_atomic_block",
    "forbid_transactions",
    "is_open",
    "is_reference",
    "new_token",
    "plain",
    "purge",
    "reference",
    "referred",
    "register_purge",
    "stores",
]

__getattr__ = lazily(
    __name__,
    globals(),
    {
        "purge": "purging",
        "register_purge": "purging",
        "DatabaseStore": "database",
        "DIALECTS": "database",
        "execute_first": "postgresql",
        "plain": "dialects",
    },
)
