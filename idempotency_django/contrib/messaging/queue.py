"""A queue on a table: which messages are due, who may have them, and whose turn is next in a group.

``process_after`` says when a message is due. A claim moves it into the future: if the process dies,
the message is due again. Of a group, only the first unfinished message may be claimed. A message
that is due and is not the first is *set aside* (null), until an earlier one is finished. So an
index leads to what is due, and no claim reads what waits in a group, however much that is.

Making a message due is always safe, by any method: it is set aside again if it is not the first.
Setting one aside is safe only while the first of its group is locked and unfinished. What finishes
that one promotes a message that was set aside, in the same transaction. So it either comes before
the lock, and the first is another one; or after it, and sees what was set aside.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import groupby, takewhile
from operator import attrgetter
from types import MappingProxyType
from typing import Any, ClassVar, Final

from django.db import Error as DatabaseFault
from django.db import connections, transaction
from django.db.models import F, Func, Model, OuterRef, QuerySet, Subquery
from django.db.models.functions import Coalesce

from ...errors import StoreUnavailable
from ...models import DatabaseNow, unlocked
from .databases import close_lost_connections, database, unindexed
from .models import MessageState

logger = logging.getLogger("idempotency_django")

PENDING: Final = MessageState.PENDING
LOOK: Final = 500
"""The most messages that one transaction examines if it sets some aside."""
LOOKS: Final = 20
"""The most such transactions of a claim: many new messages of one group must not hide later
messages of other groups."""
FEW: Final = 10
"""Among so many messages of a group, the first one that was set aside is promoted. Those before it
are claimed or delayed, or are new, and promote another when they are finished."""
UNITED: Final = 200
"""The most groups in one statement: SQLite unites at most 500 queries."""


class Unkeyed(Func):
    """The primary key as the expression of an index.

    PostgreSQL would read a table in the order of its primary key, if its statistics say that a
    group is most of the table. It has an index on this expression instead, which only that serves.
    """

    template = "%(expressions)s"

    def as_postgresql(self, compiler: Any, connection: Any, **extra: Any) -> Any:
        return self.as_sql(compiler, connection, template="(%(expressions)s + 0)", **extra)


@dataclass(frozen=True, slots=True)
class Due:
    """A message that is due: the first of its group, one without a group, or one that must wait.

    Attributes:
        group: the values of the group's columns.
        first: the first unfinished message of its group, if that is another one.
        now: when it was due, by the database's clock.
    """

    pk: int
    group: tuple[str, ...]
    first: int | None
    now: datetime

    @property
    def is_grouped(self) -> bool:
        return bool(self.group[-1])


class Queue:
    """A table of messages that are claimed and finished; a dead letter holds up its group.

    Attributes:
        model: the table, with the columns ``state`` and ``process_after``.
        group: the columns that name a group; the last is empty where a message has none.
        order: the column that orders a group, as the primary key does as well. There is an index on
            the group's columns, the state and this one.
        retried: the states that an operator can retry a message in.
    """

    model: ClassVar[type[Model]]
    group: ClassVar[tuple[str, ...]]
    order: ClassVar[str]
    retried: ClassVar[tuple[str, ...]] = (MessageState.DEAD,)

    # What an operator does to a message: each method gets its locked row, and returns the columns
    # that change. What it raises refuses the change.

    def retry(self, row: Any, by: str) -> dict[str, Any]:
        """Have it handled or sent again."""
        raise NotImplementedError

    def discard(self, row: Any, by: str) -> dict[str, Any]:
        """Give it up."""
        raise NotImplementedError

    def accept(self, row: Any, by: str) -> dict[str, Any]:
        """Have it handled although another one came before it."""
        raise NotImplementedError

    def repeat(self, row: Any, by: str) -> dict[str, Any]:
        """Have it handled or sent once more."""
        raise NotImplementedError

    # What processes do.

    def claim(
        self,
        wanted: QuerySet[Any],
        size: int,
        changes: Mapping[str, Any],
        *,
        begun: Mapping[str, Any] = MappingProxyType({}),
        passing: Collection[str] = (),
    ) -> list[Due]:
        """Claim messages that are due, of each group the first only; the longest due come first.

        An idle caller only reads: on SQLite, a transaction would take the lock of all writers.

        Args:
            wanted: which messages, due or not.
            size: how many at most.
            changes: what a claim writes, ``process_after`` among it.
            begun: what it also writes for the first message, which is begun at once.
            passing: values of the group's first column where a dead message holds up no other.
        """
        due = wanted.filter(process_after__lte=DatabaseNow())
        if not due.exists():
            return []
        heads: list[Due] = []
        for most in (size, *[LOOK] * LOOKS):
            with transaction.atomic(using=wanted.db):
                found = self._look(due, most, passing)
                waiting = [each for each in found if each.first]
                first = [each for each in found if not each.first][: size - len(heads)]
                if first and begun and not heads:
                    self._rows(wanted.db, first[:1]).update(**changes, **begun)
                if others := first[1:] if begun and not heads else first:
                    self._rows(wanted.db, others).update(**changes)
                if waiting:
                    self._set_aside(wanted.db, waiting, {each.pk for each in found})
            heads += first
            if len(heads) >= size or len(found) < most:
                break
        return heads

    def rows(
        self, using: str, heads: Sequence[Due], changes: Mapping[str, Any], *, of_each: int = 1
    ) -> list[Any]:
        """The rows that were claimed, in their order, and of each group the next ones.

        The owner of a group's first message owns the group. First comes the first of each group,
        then the second of each, and so on.

        Args:
            using: the alias of the database.
            heads: what :meth:`claim` returned.
            changes: what is written for those that come along, as for :meth:`claim`.
            of_each: how many of each group at most.
        """
        rows = {row.pk: row for row in self._rows(using, heads)} if heads else {}
        turns = [[rows[each.pk] for each in heads if each.pk in rows]]
        grouped = [each for each in heads if each.is_grouped]
        if of_each > 1 and grouped:
            lines = [*self._following(using, grouped, of_each)]
            longest = max(map(len, lines), default=0)
            turns += [[line[at] for line in lines if at < len(line)] for at in range(longest)]
            if more := [row.pk for line in lines for row in line]:
                _in_state(self.all(using), PENDING).filter(pk__in=more).update(**changes)
        return [row for turn in turns for row in turn]

    def finish(self, rows: QuerySet[Any], messages: Iterable[Any], **changes: Any) -> int:
        """Change rows; return their number. Their groups continue, unless they stay pending.

        Args:
            rows: the rows.
            messages: the messages that these are, if they are still as their owner knows them.
            changes: the new values of columns.
        """
        groups = {tuple(getattr(each, name) for name in self.group) for each in messages}
        groups = {group for group in groups if group[-1]}
        if not groups or changes.get("state", PENDING) == PENDING:
            return rows.update(**changes)
        with transaction.atomic(using=rows.db, savepoint=False):
            count = rows.update(**changes)
            if count:
                self.promote(rows.db, groups)
        return count

    def promote(self, using: str, groups: Collection[tuple[str, ...]]) -> None:
        """Let groups continue, in the transaction that has finished a message of each of them."""
        aside = []
        for line in self._lines(using, groups, FEW, "process_after"):
            aside += [row.pk for row in line if row.process_after is None][:1]
        if aside:
            waiting = _in_state(self.all(using), PENDING).filter(pk__in=aside)
            waiting.update(process_after=Coalesce("process_after", DatabaseNow()))

    def revive(self, using: str) -> None:
        """Let groups continue whose first message was deleted, or no longer blocks them."""
        aside = self.all(using).filter(state=PENDING, process_after=None)
        pks = [*aside.filter(pk=self._first(using, PENDING)).values_list("pk", flat=True)]
        for at in range(0, len(pks), LOOK):
            waiting = _in_state(self.all(using), PENDING).filter(pk__in=pks[at : at + LOOK])
            waiting.update(process_after=Coalesce("process_after", DatabaseNow()))

    def over(self, older_than: timedelta) -> QuerySet[Any]:
        """The messages that a purge deletes whose time was over that long ago."""
        return self.all(database()).filter(purge_at__lte=DatabaseNow() - older_than)

    def purgeable(self, older_than: timedelta) -> int:
        """The number of messages that :meth:`purge` would delete."""
        return self.over(older_than).count()

    def purge(self, older_than: timedelta, limit: int) -> int:
        """Delete up to that many messages whose time was over that long ago; how many there were.

        The oldest are deleted first, in one short transaction. What is pending or dead is kept. A
        group goes on whose dead letter was deleted by hand, or holds it up no longer.
        """
        using = database()
        with transaction.atomic(using=using):
            oldest = unlocked(self.over(older_than).order_by("purge_at", "pk"))
            keys = [*oldest.values_list("pk", flat=True)[:limit]]
            deleted: int = self.all(using).filter(pk__in=keys).delete()[0]
        if deleted < limit:
            self.revive(using)
        return deleted

    def _look(self, due: QuerySet[Any], most: int, passing: Collection[str]) -> list[Due]:
        """Lock messages that are due, and see which of them are not the first of their groups."""
        first = [self._first(due.db, state) for state in (PENDING, MessageState.DEAD)]
        # By one column: of many that became due at the same time, no more than these are read.
        rows = unlocked(due.order_by("process_after")).values_list(
            "pk", *self.group, *first, DatabaseNow()
        )
        found = []
        for pk, *group, pending, dead, now in rows[:most]:
            blocking = [pending, None if group[0] in passing else dead] if group[-1] else []
            earliest = min(filter(None, blocking), default=pk)
            found.append(Due(pk, tuple(group), earliest if earliest < pk else None, now))
        return found

    def _set_aside(self, using: str, waiting: list[Due], mine: set[int]) -> None:
        """Let messages wait, where the first ones of their groups can be locked."""
        if others := {each.first for each in waiting} - mine:
            unfinished = _in_state(self.all(using), PENDING, MessageState.DEAD).filter(
                pk__in=others
            )
            mine = mine | set(unlocked(unfinished).values_list("pk", flat=True))
        aside = [each for each in waiting if each.first in mine]
        self._rows(using, aside).update(process_after=None)

    def _following(self, using: str, heads: list[Due], of_each: int) -> Iterator[list[Any]]:
        """The messages that can follow each message: neither delayed messages nor those after
        them.
        """
        first = {each.group: each for each in heads}
        now = max(each.now for each in heads)
        for line in self._lines(using, first, of_each):
            head = first[tuple(getattr(line[0], name) for name in self.group)]
            after = (row for row in line if row.pk > head.pk)
            yield [*takewhile(lambda row: not row.process_after or row.process_after <= now, after)]

    def _lines(
        self, using: str, groups: Collection[tuple[str, ...]], most: int, *columns: str
    ) -> Iterator[list[Any]]:
        """The first pending messages of each group, with some columns or all of them."""
        quote = connections[using].ops.quote_name
        table, order = quote(self.model._meta.db_table), quote(self.order)
        if self._is_unkeyed and connections[using].vendor == "postgresql":
            order = f"({order} + 0)"
        names = dict.fromkeys([self.model._meta.pk.name, *self.group, self.order, *columns])
        chosen = ", ".join(map(quote, names)) if columns else "*"
        where = " AND ".join(f"{quote(name)} = %s" for name in (*self.group, "state"))
        query = (
            f"SELECT * FROM (SELECT {chosen} FROM {table} WHERE {where} "  # names
            f"ORDER BY {order} LIMIT {most:d}) AS line"
        )
        given = [*groups]
        for at in range(0, len(given), UNITED):
            some = given[at : at + UNITED]
            rows: Any = self.model._default_manager.raw(
                " UNION ALL ".join([query] * len(some)),
                [value for group in some for value in (*group, PENDING)],
                using=using,
            )
            in_order = sorted(rows, key=attrgetter(*self.group, self.order))
            for _, line in groupby(in_order, key=attrgetter(*self.group)):
                yield [*line]

    def _first(self, using: str, state: str) -> Subquery:
        """The first message of the outer one's group that is in this state."""
        group = {name: OuterRef(name) for name in self.group}
        rows = self.all(using).filter(state=state, **group)
        order = Unkeyed(self.order) if self._is_unkeyed else F(self.order)
        return Subquery(rows.order_by(order).values("pk")[:1])

    @property
    def _is_unkeyed(self) -> bool:
        return self.order == self.model._meta.pk.name

    def _rows(self, using: str, heads: Sequence[Due]) -> QuerySet[Any]:
        return self.all(using).filter(pk__in=[each.pk for each in heads])

    def all(self, using: str) -> QuerySet[Any]:
        """The rows of the table."""
        rows: QuerySet[Any] = self.model._default_manager.using(using)
        return rows


def _in_state(rows: QuerySet[Any], *states: str) -> QuerySet[Any]:
    """The rows in one of the states, out of a few; the query must not use an index on the state."""
    chosen: QuerySet[Any] = rows.alias(now=unindexed(F("state"))).filter(now__in=states)
    return chosen


def counted(count: int) -> str:
    """The number of messages, in words."""
    return f"{count:,} message{'' if count == 1 else 's'}"


def repeat(
    work: Callable[[], object],
    stop: threading.Event,
    *,
    what: str,
    poll: timedelta,
    wait: Callable[[float], object] | None = None,
) -> None:
    """Work until ``stop`` is set. An outage of the database is logged, and work resumes after it.

    Args:
        work: does what is due; whether there may be more.
        stop: when to stop.
        what: what works, in logs.
        poll: how long to wait when there was nothing to do.
        wait: waits for at most this number of seconds; by default until ``stop`` is set.
    """
    while not stop.is_set():
        close_lost_connections()
        try:
            is_busy = work()
        except (DatabaseFault, StoreUnavailable):
            logger.exception(
                "The %s cannot reach its database and will retry. No message is lost.", what
            )
            is_busy = False
        if not is_busy:
            (wait or stop.wait)(poll.total_seconds())
