"""A queue on a table: which messages are due, who may have them, and whose turn is next in a group.

``process_after`` says when a message is due. A claim moves it into the future: if the process dies,
the message is due again. Of a group, only the first unfinished message may be claimed. A message
that is due and is not the first is *set aside* (null), until an earlier one is finished. So an
index leads to what is due, and no claim reads what waits in a group, however much that is.

Making a message due is always safe, by any method: it is set aside again if it is not the first.
Setting one aside is safe only while an earlier one of its group is locked and unfinished: the first
one, or one that stays due. What finishes that one promotes a message that was set aside, in the
same transaction. So it either comes before the lock, and finds nothing set aside; or after it, and
sees what was. What was deleted promotes none: an idle process looks for such groups, a few at a
time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from operator import attrgetter
from typing import Any, ClassVar, Final

from django.db import connections, transaction
from django.db.models import BigIntegerField, F, Min, Model, QuerySet
from django.db.models.expressions import RawSQL
from django.db.models.functions import Coalesce

from ...models import DatabaseNow, unlocked
from .databases import database, unindexed
from .models import MessageState

PENDING: Final = MessageState.PENDING
LOOK: Final = 500
"""The most messages, or groups, that one statement examines."""
LOOKS: Final = 20
"""The most further looks of a claim that has found some: many new messages of one group must not
hide later messages of other groups."""
REVIVAL: Final = 0.1
"""Seconds for which an idle process looks for groups whose first message was deleted; the next time
it goes on from there."""
SEARCHED: Final = 100
"""The messages that one statement of that search reads; PostgreSQL finds up to 100 groups at a time
by a partial index."""
UNITED: Final = 200
"""The most groups in one statement: SQLite unites at most 500 queries."""


@dataclass(frozen=True, slots=True)
class Due:
    """A message that is due.

    Attributes:
        stream: its group; empty: it has none.
        pending: the first pending message of its group, which may be itself.
        dead: the first dead letter of its group.
    """

    pk: int
    stream: str
    pending: int | None
    dead: int | None

    @property
    def first(self) -> int:
        """The first unfinished message of its group."""
        return min(self.pk, self.pending or self.pk, self.dead or self.pk)


class Queue:
    """A table of messages that are claimed and finished.

    Attributes:
        name: in the names of the table's indexes.
        model: the table, with the columns ``state`` and ``process_after``.
        place: the column that says where a message belongs: its topic or source.
        since: the column that says when it came.
        retried: the states that an operator can retry a message in.
    """

    name: ClassVar[str]
    model: ClassVar[type[Model]]
    place: ClassVar[str]
    since: ClassVar[str]
    retried: ClassVar[tuple[str, ...]] = (MessageState.DEAD,)

    # A queue has a method for each action of an operator: retry(), discard() and repeat(). It gets
    # the message's locked row and the operator's name, and returns the columns that change. What it
    # raises refuses the change.

    def finish(self, rows: QuerySet[Any], messages: Iterable[Any], **changes: Any) -> int:
        """Change rows; return their number.

        Args:
            rows: the rows.
            messages: the messages that these are, if they are still as their owner knows them.
            changes: the new values of columns.
        """
        return rows.update(**changes)

    def over(self, older_than: timedelta) -> QuerySet[Any]:
        """The messages that a purge deletes whose time was over that long ago."""
        return self.all(database()).filter(purge_at__lte=DatabaseNow() - older_than)

    def purge(self, older_than: timedelta, limit: int) -> int:
        """Delete up to that many messages whose time was over that long ago; how many there were.

        The oldest are deleted first, in one short transaction. What is pending or dead is kept.
        """
        using = database()
        with transaction.atomic(using=using):
            oldest = unlocked(self.over(older_than).order_by("purge_at", "pk"))
            keys = [*oldest.values_list("pk", flat=True)[:limit]]
            return self.delete(self.all(using).filter(pk__in=keys))

    def delete(self, rows: QuerySet[Any]) -> int:
        """Delete rows that are locked; return their number."""
        return rows.delete()[0]

    def all(self, using: str) -> QuerySet[Any]:
        """The rows of the table."""
        rows: QuerySet[Any] = self.model._default_manager.using(using)
        return rows


class GroupQueue(Queue):
    """A queue with groups, of which a dead letter holds up its own.

    Besides, its table has the columns ``stream``, the group or empty, and ``sequence``, which
    orders a group.
    """

    _after: str = ""  # the last group that revive() has looked at

    def claim(
        self,
        wanted: QuerySet[Any],
        size: int,
        changes: Mapping[str, Any],
    ) -> list[Due]:
        """Claim messages that are due, of each group the first only; the longest due come first.

        None is returned only if none is due. An idle caller only reads: on SQLite, a transaction
        would take the lock of all writers.

        Args:
            wanted: which messages, due or not.
            size: how many at most.
            changes: what a claim writes, ``process_after`` among it.
        """
        due = wanted.filter(process_after__lte=DatabaseNow())
        if not due.order_by("process_after").values("pk")[:1]:  # by the index
            return []
        heads: list[Due] = []
        looks, most = 0, size
        while True:
            with transaction.atomic(using=wanted.db):
                found = self._look(due, most)
                turns = [each for each in found if each.first == each.pk]
                new = turns[: size - len(heads)]
                if new:
                    self._rows(wanted.db, new).update(**changes)
                left = self._set_aside(wanted.db, found)
            heads += new
            if len(heads) >= size or len(found) < most or (heads and looks >= LOOKS):
                return heads
            looks, most = looks + 1, LOOK + left  # it finds those again

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
        grouped = {each.stream: each for each in heads if each.stream}
        if of_each > 1 and grouped:
            found = self._lines(using, grouped, of_each)
            lines = [
                [row for row in line if row.pk > grouped[stream].pk]
                for stream, line in found.items()
            ]
            longest = max(map(len, lines), default=0)
            turns += [[line[at] for line in lines if at < len(line)] for at in range(longest)]
            if more := [row.pk for line in lines for row in line]:
                _in_state(self.all(using), PENDING).filter(pk__in=more).update(**changes)
        return [row for turn in turns for row in turn]

    def finish(self, rows: QuerySet[Any], messages: Iterable[Any], **changes: Any) -> int:
        """As :meth:`Queue.finish`. Their groups continue, unless they stay pending."""
        streams = {each.stream for each in messages if each.stream}
        if not streams or changes.get("state", PENDING) == PENDING:
            return rows.update(**changes)
        with transaction.atomic(using=rows.db, savepoint=False):
            finished = rows.update(**changes)
            if finished:
                # Each group's next one; a search for one that was set aside would read all others.
                lines = self._lines(rows.db, streams, 1, "id, stream, process_after")
                following = [row for line in lines.values() for row in line]
                aside = [row.pk for row in following if row.process_after is None]
                self._make_due(rows.db, aside)
        return finished

    def stopped(self, using: str, *, seconds: float, after: str = "") -> tuple[dict[str, int], str]:
        """The groups whose first message was deleted, each with the message that is next.

        It leaps over the messages of a large group, so its cost does not grow with them.

        Args:
            using: the alias of the database.
            seconds: for how long to look.
            after: look at the groups after this one.

        Returns:
            Them, and the last group that was looked at; empty if that was the last of all.
        """
        query = (
            f"SELECT id, stream, process_after FROM {self._in_lines(using)} "  # names
            f"WHERE state = 'pending' AND stream > %s "
            f"ORDER BY stream, sequence LIMIT {SEARCHED:d}"
        )
        found: dict[str, int] = {}
        until = time.monotonic() + seconds
        while True:
            rows: list[Any] = [*self.model._default_manager.raw(query, [after], using=using)]
            first = {row.stream: row for row in reversed(rows)}
            aside = {name: row.pk for name, row in first.items() if row.process_after is None}
            dead = self.all(using).filter(state=MessageState.DEAD, stream__in=[*aside])
            behind = dict(dead.values_list("stream").annotate(Min("pk")))
            found |= {name: pk for name, pk in aside.items() if behind.get(name, pk) >= pk}
            after = rows[-1].stream if len(rows) == SEARCHED else ""
            if not after or time.monotonic() >= until:
                return found, after

    def revive(self, using: str) -> int:
        """Let groups continue whose first message was deleted; return their number.

        It looks for a moment, and the next call goes on from there.
        """
        found, self._after = self.stopped(using, seconds=REVIVAL, after=self._after)
        self._make_due(using, [*found.values()])
        return len(found)

    def _look(self, due: QuerySet[Any], most: int) -> list[Due]:
        """Lock messages that are due, and see which are the first ones of their groups."""
        table = self.model._meta.db_table
        first = [
            RawSQL(  # noqa: S611  # names
                f"CASE WHEN {table}.stream = '' THEN NULL ELSE (SELECT earlier.id "
                f"FROM {self._in_lines(due.db, 'earlier')} WHERE earlier.state = '{state}' "
                f"AND earlier.stream = {table}.stream {self._only_grouped(due.db, 'earlier.')} "
                f"ORDER BY sequence LIMIT 1) END",
                [],
                output_field=BigIntegerField(),
            )
            for state in (PENDING, MessageState.DEAD)
        ]
        # By one column: of many that became due at the same time, no more than these are read.
        rows = unlocked(due.order_by("process_after"))
        found = rows.values_list("pk", "stream", *first)
        return [Due(*each) for each in found[:most]]

    def _set_aside(self, using: str, found: Sequence[Due]) -> int:
        """Let messages wait for an earlier one that is locked; how many stay due.

        Where another transaction has the first one of a group, the others wait for the earliest of
        those that were found, which stays due.
        """
        waiting = [each for each in found if each.first < each.pk]
        if not waiting:
            return 0
        unfinished = _in_state(self.all(using), PENDING, MessageState.DEAD)
        first = unfinished.filter(pk__in={each.first for each in waiting})
        locked = {*unlocked(first).values_list("pk", flat=True)}
        earliest: dict[str, int] = {}
        for each in waiting:
            earliest[each.stream] = min(each.pk, earliest.get(each.stream, each.pk))
        kept = {each.pk for each in waiting if each.first not in locked} & {*earliest.values()}
        self._rows(using, [each for each in waiting if each.pk not in kept]).update(
            process_after=None
        )
        return len(kept)

    def _make_due(self, using: str, pks: Sequence[int]) -> None:
        if pks:
            rows = _in_state(self.all(using), PENDING).filter(pk__in=pks)
            rows.update(process_after=Coalesce("process_after", DatabaseNow()))

    def _lines(
        self,
        using: str,
        streams: Iterable[str],
        most: int,
        columns: str = "*",
    ) -> dict[str, list[Any]]:
        """The first pending messages of each group, in their order."""
        query = (
            f"SELECT * FROM (SELECT {columns} FROM {self._in_lines(using)} "  # names
            f"WHERE state = 'pending' AND stream = %s "
            f"ORDER BY sequence LIMIT {most:d}) AS line"
        )
        lines: dict[str, list[Any]] = {stream: [] for stream in streams}
        given = [*lines]
        for at in range(0, len(given), UNITED):
            some = given[at : at + UNITED]
            united = " UNION ALL ".join([query] * len(some))
            rows: Any = self.model._default_manager.raw(united, some, using=using)
            for row in rows:
                lines[row.stream].append(row)
        return {stream: sorted(line, key=attrgetter("pk")) for stream, line in lines.items()}

    def _in_lines(self, using: str, alias: str = "") -> str:
        """The table, read by the index that has groups in their order."""
        table = f"{self.model._meta.db_table} {alias}"
        if connections[using].vendor != "mysql":
            return table
        return f"{table} FORCE INDEX (idempotency_{self.name}_order_idx)"

    def _only_grouped(self, using: str, table: str = "") -> str:
        """A condition for PostgreSQL's index, which has no others. SQLite would search by it."""
        return f"AND {table}stream > ''" if connections[using].vendor == "postgresql" else ""

    def _rows(self, using: str, heads: Sequence[Due]) -> QuerySet[Any]:
        return self.all(using).filter(pk__in=[each.pk for each in heads])


def _in_state(rows: QuerySet[Any], *states: str) -> QuerySet[Any]:
    """The rows in one of the states, out of a few; the query must not use an index on the state."""
    chosen: QuerySet[Any] = rows.alias(now=unindexed(F("state"))).filter(now__in=states)
    return chosen


def counted(count: int) -> str:
    """The number of messages, in words."""
    return f"{count:,} message{'' if count == 1 else 's'}"
