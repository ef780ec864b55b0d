"""Timelines: all that belongs to one operation, through its causes, in all tables.

Each record or message names the operation that caused it. A source finds those of one table in one
database; :func:`trace` follows the causes through all sources, up to the root and down to the last
effect.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ClassVar, Final

from django.apps import apps
from django.db import router
from django.db.models import Model, Q, QuerySet
from django.utils.timezone import is_aware, localtime
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ..conf import default_store
from ..models import INTERRUPTED, DatabaseNow, IdempotencyKey, IdempotencyStep
from ..policy import Policy
from ..stores import Status, reference, referred, stores

# The states of records, as people read them.

HELD: Final = "held"

STATES: Final[dict[str, Any]] = {
    Status.IN_PROGRESS.value: gettext_lazy("in progress"),
    INTERRUPTED: gettext_lazy("interrupted"),
    HELD: gettext_lazy("held"),
    Status.COMPLETED.value: gettext_lazy("completed"),
    Status.FAILED.value: gettext_lazy("failed"),
}
"""The name of each state. Every record is in one of them."""


def state_of(record: Any) -> str:
    """The state of a record that was read with its database's ``now``: one of ``STATES``."""
    if record.status != Status.IN_PROGRESS or record.lease_expires_at > record.now:
        return str(record.status)
    return HELD if record.hold else INTERRUPTED


# What a timeline is made of.

MISSING: Final = "missing"
"""The kind of a member that no source has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A record or a message in a chain of causes. Two are equal if they are the same one.

    Attributes:
        kind: what it is: ``"record"``, ``"outbox message"``, ``"inbox message"`` or ``"missing"``.
        reference: what its effects name as their cause: key and scope, or message id and scope.
        where: the alias of the database that it is in.
        title: what is done, for people.
        state: how far it is, for people.
        caused_by: the reference of its cause; empty: it has none, or none is known.
        since: when it came to be, or its last attempt began; ``None``: unknown.
        row: the row as its source has read it; ``None``: it is missing.
        source: the source that has found it; ``None``: it is missing.
    """

    kind: str
    reference: str
    where: str = ""
    title: str = field(compare=False)
    state: str = field(default="", compare=False)
    caused_by: str = field(default="", compare=False)
    since: datetime | None = field(default=None, compare=False)
    row: Any = field(default=None, compare=False, repr=False)
    source: Any = field(default=None, compare=False, repr=False)

    @property
    def key(self) -> str:
        """Its key or message id."""
        return referred(self.reference)[0]

    @property
    def scope(self) -> str:
        """Its scope."""
        return referred(self.reference)[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An event in the life of a member, past or to come.

    Attributes:
        at: when, by the clock of the member's database.
        now: that clock when the member was read.
        what: what happened, for people.
        member: what it happened to.
        by: the user who did it; empty: no user of the admin.
        result: what came of it, as JSON or an error, for those who may see responses.
    """

    at: datetime
    now: datetime
    what: str
    member: Member
    by: str = ""
    result: str = ""

    @property
    def ahead(self) -> bool:
        """Whether it is yet to come."""
        return self.at > self.now

    @property
    def exactly(self) -> str:
        """The moment to the millisecond, with its time zone if the project has time zones."""
        at = localtime(self.at) if is_aware(self.at) else self.at
        return f"{at:%Y-%m-%d %H:%M:%S}.{at.microsecond // 1000:03} {at:%Z}".strip()


@dataclass(frozen=True, slots=True)
class Timeline:
    """A chain of causes, and what happened in it.

    Attributes:
        focus: the member that was asked for.
        members: the members with their depth in the chain: each cause before its effects.
        entries: what happened, in order of time.
        more: whether members were left out, because a timeline holds no more.
    """

    focus: Member
    members: tuple[tuple[int, Member], ...]
    entries: tuple[Entry, ...]
    more: bool = False


# Sources.


@dataclass(frozen=True)
class Source:
    """Finds the members that are rows of one table in one database; subclass it for each table.

    Attributes:
        using: the alias of the database.
        model: of the table. It has a column ``caused_by`` with an index, or :meth:`effects` is
            overridden.
        deferred: columns that are not read: they are long, or confidential.
    """

    using: str
    model: ClassVar[type[Model]]
    deferred: ClassVar[Sequence[str]] = ()

    @classmethod
    def everywhere(cls) -> Iterable[Source]:
        """One source for each database that the table is in, as the settings are now."""
        raise NotImplementedError

    def find(self, name: str, scope: str | None) -> Iterable[Member]:
        """The members with this key or message id, in this scope or in any."""
        raise NotImplementedError

    def member(self, row: Any) -> Member:
        """The member that a row of the table is."""
        raise NotImplementedError

    def moments(self, member: Member) -> Iterable[Entry]:
        """The entries of a member, in order."""
        raise NotImplementedError

    def rows(self) -> QuerySet[Any]:
        """The rows of the table, with the database's time as ``now``."""
        rows: QuerySet[Any] = self.model._base_manager.using(self.using).order_by("pk")
        with_now: QuerySet[Any] = rows.annotate(now=DatabaseNow())
        return with_now.defer(*self.deferred)

    def members(self, rows: QuerySet[Any]) -> Iterable[Member]:
        """The members that these rows are."""
        return map(self.member, rows)

    def effects(self, members: Collection[Member], limit: int) -> Iterable[Member]:
        """The members whose cause is one of these: the oldest ones, at most ``limit``."""
        causes = [member.reference for member in members]
        # That it is not empty is what a partial index asks for.
        return self.members(self.rows().filter(~Q(caused_by=""), caused_by__in=causes)[:limit])

    def entries(self, members: Sequence[Member], results_of: str) -> Iterable[Entry]:
        """The entries of members of this source."""
        for member in members:
            yield from self.moments(member)
        yield from _logged(members)


_registered: Final[dict[type[Source], None]] = {}


def register(source: type[Source]) -> type[Source]:
    """Have timelines include what a class of sources finds; a decorator of the class."""
    _registered[source] = None
    return source


def _sources() -> Iterator[Source]:
    for source in _registered:
        yield from source.everywhere()


def entry(member: Member, what: Any, at: datetime, **more: Any) -> Entry:
    """The entry of what happened to a row, by the clock of its database."""
    return Entry(at=at, now=member.row.now, what=str(what), member=member, **more)


def _logged(members: Sequence[Member]) -> Iterator[Entry]:
    """The entries of what users did in the admin to members that are rows of one table.

    The log has the clock of the server that the operator used, not the database's.
    """
    if not apps.is_installed("django.contrib.admin"):
        return
    by_pk = {str(member.row.pk): member for member in members}
    types: Any = apps.get_model("contenttypes", "ContentType").objects
    log: Any = apps.get_model("admin", "LogEntry").objects.filter(
        content_type=types.get_for_model(members[0].row), object_id__in=list(by_pk)
    )
    for done in log.select_related("user").order_by("action_time", "pk"):
        what = done.get_change_message() or done.get_action_flag_display()
        by = done.user.get_username()
        yield entry(by_pk[done.object_id], what, done.action_time, by=by)


# The sources of records.

CONFIDENTIAL: Final = (
    *("owner_token", "fingerprint", "response_headers", "response_body", "error", "attempts"),
)
"""The columns that need the permission to view stored results."""


@register
class Records(Source):
    """The records of a database tell all that happened to them."""

    model = IdempotencyKey
    deferred = CONFIDENTIAL

    @classmethod
    def everywhere(cls) -> Iterable[Source]:
        return map(cls, dict.fromkeys(store.using for store in stores.all() if store.using))

    def find(self, name: str, scope: str | None) -> Iterable[Member]:
        rows = self.rows().filter(key=name)
        return self.members(rows if scope is None else rows.filter(scope=scope))

    def member(self, row: Any) -> Member:
        return Member(
            kind="record",
            reference=reference(row.key, row.scope),
            where=self.using,
            title=row.operation,
            state=str(STATES[state_of(row)]),
            caused_by=row.caused_by,
            since=row.created_at,
            row=row,
            source=self,
        )

    def moments(self, member: Member) -> Iterator[Entry]:
        row = member.row
        begun = _("created") if row.attempt == 1 else _("attempt %(attempt)d began")
        yield entry(member, begun % {"attempt": row.attempt}, row.created_at)
        if row.completed_at:
            yield entry(member, row.get_status_display(), row.completed_at)
        if row.lease_expires_at:
            over = row.lease_expires_at <= row.now
            yield entry(member, _("lease ended") if over else _("lease ends"), row.lease_expires_at)
        if row.last_replayed_at:
            count = row.replay_count
            replayed = ngettext("replayed", "replayed %(count)d times, last", count)
            yield entry(member, replayed % {"count": count}, row.last_replayed_at)
        if row.expires_at and row.status != Status.FAILED:  # whose key is free already
            yield entry(member, _("expires"), row.expires_at)
        if row.purge_at and state_of(row) != HELD:
            yield entry(member, _("may be purged"), row.purge_at)

    def entries(self, members: Sequence[Member], results_of: str) -> Iterator[Entry]:
        # The log does not tell in which database a row is.
        logged = list(_logged(members)) if self.using == administered() else []
        settled: dict[Member, list[datetime]] = {}
        for each in logged:
            settled.setdefault(each.member, []).append(each.at)
        yield from self._earlier(members, settled, results_of)
        steps: dict[Any, list[Entry]] = {}
        for step in self._steps({member.row.pk: member for member in members}, results_of):
            steps.setdefault(step.member, []).append(step)
        for member in members:
            # In the order in which it may have happened at one moment.
            begun, *others = self.moments(member)
            if any(at > begun.at for at in settled.get(member, ())):
                others = [each for each in others if each.at != member.row.completed_at]
            yield from (begun, *steps.get(member, ()), *others)
        yield from logged

    def _earlier(
        self, members: Sequence[Member], settled: dict[Member, list[datetime]], results_of: str
    ) -> Iterator[Entry]:
        """The attempts before the last one of each record, in one query if there are any.

        If an operator has settled one, the admin's log says how it ended.
        """
        retried = {member.row.pk: member for member in members if member.row.attempt > 1}
        rows = IdempotencyKey.objects.using(self.using).filter(
            pk__in=list(retried), attempts__isnull=False
        )
        kept: Any = rows.values_list("pk", "attempts") if retried else ()
        for pk, attempts in kept:
            member = retried[pk]
            began = [datetime.fromisoformat(each["began"]) for each in attempts]
            until = [*began[1:], member.row.created_at]
            for each, since, then in zip(attempts, began, until, strict=True):
                values = {**each, "state": STATES[each["state"]]}
                begun = _("created") if each["attempt"] == 1 else _("attempt %(attempt)d began")
                yield entry(member, begun % values, since)
                if not any(since < at < then for at in settled.get(member, ())):
                    error = each["error"] if member.reference == results_of else ""
                    what = _("attempt %(attempt)d: %(state)s") % values
                    yield entry(member, what, datetime.fromisoformat(each["ended"]), result=error)

    def _steps(self, members: dict[Any, Member], results_of: str) -> Iterator[Entry]:
        """The steps of all members, in one query; one more for those whose results are shown."""
        every = IdempotencyStep.objects.using(self.using).order_by("record", "pk")
        own = [pk for pk, member in members.items() if member.reference == results_of]
        results = dict(every.filter(record__in=own).values_list("pk", "result")) if own else {}
        for step in every.filter(record__in=list(members)).defer("result"):
            what = _("step %(name)s, by attempt %(attempt)d")
            what %= {"name": step.name, "attempt": step.attempt}
            result = results.get(step.pk, "")
            yield entry(members[step.record_id], what, step.completed_at, result=result)


def administered() -> str:
    """The database whose records the admin shows.

    It is the database that the default store writes to; else where a router sends writes.
    """
    for alias in (default_store(), Policy().resolved().store):
        using = stores[alias].using if alias in stores else None
        if using:
            return using
    return router.db_for_write(IdempotencyKey)


# The chain of causes.

MOST: Final = 200
"""The most members of a timeline. The chain of a batch job can have a hundred thousand."""

DEEPEST: Final = 50
"""The most causes in a row that are followed, in each direction."""


def find(name: str, scope: str | None = None) -> list[Member]:
    """The members with a key or message id.

    Args:
        name: the key or message id.
        scope: the scope that it is in; ``None``: any scope of any database.
    """
    return [member for source in _sources() for member in source.find(name, scope)]


def member_of(row: Any) -> Member | None:
    """The member that a row is; ``None``: no source knows its table, or it is gone."""
    for kind in _registered:
        if issubclass(type(row), getattr(kind, "model", ())):
            source = kind(str(row._state.db))
            return next(iter(source.members(source.rows().filter(pk=row.pk))), None)
    return None


def trace(focus: Member, results_of: str = "") -> Timeline:
    """The timeline of the chain that a member is in.

    Causes come first: up to the root, or ``DEEPEST`` of them. Then come what the member has caused,
    and what its causes have caused besides, generation by generation, up to ``MOST`` members.
    A cause that no source has is a member of the kind ``"missing"``.

    Args:
        focus: where to begin, from :func:`find`.
        results_of: the reference of the record whose results of steps and errors of attempts are
            shown; empty: of none.
    """
    chain = _Chain(focus)
    chain.up(focus)
    chain.down([focus])
    chain.down(chain.causes)
    members = tuple(chain.ordered())
    entries = tuple(chain.entries([member for _, member in members], results_of))
    return Timeline(focus, members, entries, chain.more)


class _Chain:
    """Finds the members of a chain of causes, starting from one.

    Attributes:
        causes: the cause of the focus, its cause, and so on to the root.
        more: whether something was left out.
    """

    def __init__(self, focus: Member) -> None:
        self.causes: list[Member] = []
        self.more = False
        self._members: dict[Member, None] = {focus: None}
        self._followed: set[str] = set()

    def up(self, member: Member) -> None:
        """Take in the cause of the member, its cause, and so on."""
        while member.caused_by and len(self.causes) < DEEPEST:
            found = self._find(member.caused_by)
            if not found:  # a reused key may be caused by its own effect
                return
            member = found[0]
            self.causes.append(member)
        self.more = self.more or bool(member.caused_by)

    def _find(self, reference: str) -> list[Member]:
        """Take in the members with this reference that the first source finds and that are new.

        A message and the record of what was done for it may have one reference.
        """
        key, scope = referred(reference)
        for source in _sources():
            if new := self._add(source.find(key, scope)):
                return new
        if any(member.reference == reference for member in self._members):
            return []
        return self._add([Member(kind=MISSING, reference=reference, title=key)])

    def down(self, generation: list[Member]) -> None:
        """Take in what these members have caused, and what that has caused, and so on."""
        limit = MOST + 1  # one more than the limit shows that there are more
        for _generation in range(DEEPEST):
            asked = [member for member in generation if member.reference not in self._followed]
            if not asked:
                return
            self._followed.update(member.reference for member in asked)
            generation = []
            for source in _sources():
                generation += self._add(source.effects(asked, limit))
        self.more = self.more or bool(generation)

    def _add(self, members: Iterable[Member]) -> list[Member]:
        """Take in those of the members that are new, as long as there is room."""
        new = [member for member in members if member not in self._members]
        room = max(0, MOST - len(self._members))
        self.more = self.more or len(new) > room
        self._members.update(dict.fromkeys(new[:room]))
        return new[:room]

    def ordered(self) -> Iterator[tuple[int, Member]]:
        """The members with their depth, each cause before its effects, and these as written."""
        effects: dict[str, list[Member]] = {}
        for member in sorted(self._members, key=_as_written):
            effects.setdefault(member.caused_by, []).append(member)
        known = {member.reference for member in self._members}
        top = self.causes[-1] if self.causes else next(iter(self._members))
        others = [member for member in self._members if member.caused_by not in known]
        seen: set[Member] = set()
        pending = [(0, member) for member in (*reversed(others), top)]
        while pending:
            depth, member = pending.pop()
            if member not in seen:
                seen.add(member)
                yield depth, member
                below = effects.get(member.reference, ())
                pending += [(depth + 1, effect) for effect in reversed(below)]

    def entries(self, ordered: Sequence[Member], results_of: str) -> list[Entry]:
        """The entries in order of time; at one moment, in the order of members and sources.

        Some databases tell time in milliseconds, in which an operation can have caused another.
        """
        by_source: dict[Source, list[Member]] = {}
        for member in ordered:
            if member.source is not None:
                by_source.setdefault(member.source, []).append(member)
        told = [
            entry
            for source, members in by_source.items()
            for entry in source.entries(members, results_of)
        ]
        places = {member: place for place, member in enumerate(ordered)}
        return sorted(told, key=lambda entry: (entry.at.timestamp(), places[entry.member]))


def _as_written(member: Member) -> tuple[Any, ...]:
    """Sorts members by time; those of one moment by table, and then as their rows were inserted.

    What is missing has no time, and is at the end.
    """
    place = (member.where, member.reference if member.row is None else member.row.pk)
    at = 0.0 if member.since is None else member.since.timestamp()
    return (member.since is None, at, type(member.source).__name__, *place)
