"""The source of records: of the database stores in full, of other stores what they tell."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final, TypeVar

from django.db import router
from django.db.models import Q, QuerySet

from ..conf import default_store
from ..models import DatabaseNow, IdempotencyKey
from ..policy import Policy, keys
from ..records import Record, reference, referred
from ..stores import Store, stores
from .lives import lives
from .operators import logged
from .sources import UNREACHABLE
from .states import HELD, INTERRUPTED, STATES, state_of
from .timelines import Confidential, Entry, Member

KIND: Final = "record"

CONFIDENTIAL: Final = ("owner_token", "fingerprint", "response_headers", "response_body", "error")
"""Columns that are read for those only who may see answers."""

_Found = TypeVar("_Found")


class RecordSource:
    """The records of all stores.

    Those of a database tell all that happened to them. A store outside of a database finds a
    record by key and scope only, and tells neither times nor causes.
    """

    def by_name(self, name: str, scope: str | None, unreachable: set[str]) -> Iterable[Member]:
        names = _possible_keys(name)
        if scope is not None:
            for key in names:
                yield from self.by_reference(reference(key, scope), unreachable)
            return
        for using in _databases():
            rows = _rows(using).filter(key__in=names).order_by("pk")
            yield from self._members(rows, unreachable)

    def by_reference(self, reference: str, unreachable: set[str]) -> Iterable[Member]:
        key, scope = referred(reference)
        for using in _databases():
            yield from self._members(_rows(using).filter(key=key, scope=scope), unreachable)
        for store in _without_database():
            record = _asked(
                lambda store=store: store.get(key, scope),  # type: ignore[misc]
                f"store {store.alias!r}",
                unreachable,
            )
            if record is not None:
                yield self._elsewhere(store, record)

    def of(self, row: Any) -> Member | None:
        if not isinstance(row, IdempotencyKey):
            return None
        return next(map(self._member, _rows(str(row._state.db)).filter(pk=row.pk)), None)

    def caused_by(
        self, members: Collection[Member], limit: int, unreachable: set[str]
    ) -> Iterable[Member]:
        references = [member.reference for member in members]
        for using in _databases():
            # That it is not empty is what the partial index asks for.
            effects = _rows(using).filter(~Q(caused_by=""), caused_by__in=references)
            yield from self._members(effects.order_by("pk")[:limit], unreachable)

    def entries(self, members: Sequence[Member], shown: Confidential) -> Iterable[Entry]:
        for member in members:
            if member.row is None:
                yield Entry(at=None, now=None, what=member.state, member=member, timed=False)
        rows = [member for member in members if member.row is not None]
        yield from lives(rows, shown)
        yield from logged([member for member in rows if member.where == administered()])

    def _members(self, rows: QuerySet[Any], unreachable: set[str]) -> list[Member]:
        found = _asked(lambda: list(rows), f"database {rows.db!r}", unreachable)
        return [self._member(row) for row in found or ()]

    def _member(self, row: Any) -> Member:
        return Member(
            kind=KIND,
            reference=reference(row.key, row.scope),
            title=row.operation,
            state=str(STATES[state_of(row)]),
            caused_by=row.caused_by,
            since=row.created_at,
            where=row._state.db,
            row=row,
            source=self,
        )

    def _elsewhere(self, store: Store, record: Record) -> Member:
        state = HELD if record.held else INTERRUPTED if record.interrupted else str(record.status)
        return Member(
            kind=KIND,
            reference=reference(record.key, record.scope),
            title=record.key,
            state=str(STATES[state]),
            where=store.alias,
            source=self,
        )


def administered() -> str:
    """The database whose records the admin shows.

    It is the one that the default store writes to; else where a router sends writes.
    """
    for alias in (default_store(), Policy().resolved().store):
        using = stores[alias].using if alias in stores else None
        if using:
            return using
    return router.db_for_write(IdempotencyKey)


def _databases() -> list[str]:
    """The databases with records, each once."""
    return list(dict.fromkeys(store.using for store in stores.all() if store.using))


def _without_database() -> list[Store]:
    return [store for store in stores.all() if not store.using]


def _rows(using: str) -> QuerySet[Any]:
    rows: QuerySet[Any] = IdempotencyKey.objects.using(using).annotate(now=DatabaseNow())
    return rows.defer(*CONFIDENTIAL)


def _possible_keys(name: str) -> list[str]:
    """The keys that a record may have for a key, or for somebody else's identifier."""
    if not name:
        return []
    fitted = keys.fit(name)
    return [name, fitted] if fitted != name and keys.VALID.fullmatch(name) else [fitted]


def _asked(ask: Callable[[], _Found], where: str, unreachable: set[str]) -> _Found | None:
    try:
        return ask()
    except UNREACHABLE:
        unreachable.add(where)
        return None
