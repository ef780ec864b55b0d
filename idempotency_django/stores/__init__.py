"""The stores by alias: ``stores["default"]``, as in ``CACHES``; their contract, and what they keep.

What needs the models is imported at its first use."""

from typing import TYPE_CHECKING

from ..lazy import lazily
from .atomic_blocks import forbid_transactions, is_open
from .base import Store
from .codec import StoredBinaryField, StoredTextField, decode, dump_text, encode, load_text
from .handler import stores
from .records import (
    Claim,
    Operation,
    Payload,
    Record,
    Status,
    Step,
    derived_key,
    is_reference,
    new_token,
    reference,
    referred,
)

if TYPE_CHECKING:
    from .database import DatabaseStore
    from .database.dialects import DIALECTS, plain
    from .database.dialects.combining import execute_first
    from .database.transactions import forbid_atomic_block
    from .purging import Purgeable, purge, register_purge, registered_purges

__all__ = [
    "DIALECTS",
    "Claim",
    "DatabaseStore",
    "Operation",
    "Payload",
    "Purgeable",
    "Record",
    "Status",
    "Step",
    "Store",
    "StoredBinaryField",
    "StoredTextField",
    "decode",
    "derived_key",
    "dump_text",
    "encode",
    "execute_first",
    "forbid_atomic_block",
    "forbid_transactions",
    "is_open",
    "is_reference",
    "load_text",
    "new_token",
    "plain",
    "purge",
    "reference",
    "referred",
    "register_purge",
    "registered_purges",
    "stores",
]

__getattr__ = lazily(
    __name__,
    globals(),
    {
        "Purgeable": "purging",
        "purge": "purging",
        "register_purge": "purging",
        "registered_purges": "purging",
        "DatabaseStore": "database",
        "DIALECTS": "database.dialects",
        "execute_first": "database.dialects.combining",
        "plain": "database.dialects",
        "forbid_atomic_block": "database.transactions",
    },
)
