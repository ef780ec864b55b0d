"""What an operation was caused by, and what it has caused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from django.db.models import QuerySet

from ..records import reference, referred

SHOWN: Final = 50
"""Operations that are listed of those that one has caused; the first ones."""


@dataclass(frozen=True, slots=True)
class Relatives:
    """The records before and after a record in the chain of causes.

    Attributes:
        parent: the record of the operation whose handler asked for this one; ``None``: there is
            none, or it is not there any more.
        gone: the key of that record if it is not there: it was purged, rolled back, or is in
            another store.
        children: the records of the operations that its handler asked for, the oldest first.
        more: whether there are more of them than are listed.
    """

    parent: Any
    gone: str
    children: Sequence[Any]
    more: bool

    @classmethod
    def of(cls, record: Any, rows: QuerySet[Any]) -> Relatives:
        """The relatives of a record among the rows."""
        parent, gone = None, ""
        if record.caused_by:
            key, scope = referred(record.caused_by)
            parent = rows.filter(key=key, scope=scope).first()
            gone = "" if parent else key
        caused = rows.filter(caused_by=reference(record.key, record.scope)).order_by("pk")
        # That it is not empty is what the partial index asks for.
        children = list(caused.exclude(caused_by="")[: SHOWN + 1])
        return cls(parent, gone, children[:SHOWN], len(children) > SHOWN)
