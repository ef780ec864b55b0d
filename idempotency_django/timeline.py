"""What a timeline is made of: the members of a chain of causes, and what happened to each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import groupby, islice
from operator import attrgetter
from typing import Any, Final, Protocol, TypeVar

from django.apps import apps
from django.db import InterfaceError, OperationalError, router
from django.db.models import Q, QuerySet
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.timesince import timesince, timeuntil
from django.utils.timezone import is_aware, localtime
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from .conf import default_store
from .errors import StoreUnavailable
from .models import GRACE, DatabaseNow, IdempotencyKey, IdempotencyStep
from .policy import Policy, keys
from .policy.seals import derived_keys
from .records import Record, Status, reference, referred
from .stores import Store, stores


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment, seen from now.

    Attributes:
        at: the moment; ``None``: never.
        now: the database's clock when the moment was read.
    """

    at: datetime | None
    now: datetime | None

    @property
    def ahead(self) -> bool:
        """Whether it is yet to come."""
        return self.at is None or self.now is None or self.at > self.now

    @property
    def age(self) -> str:
        """How long ago it was or how far ahead it is, in the largest unit."""
        if self.at is None or self.now is None:
            return _("never")
        if abs(self.at - self.now) < timedelta(minutes=1):
            return _("now")
        if self.ahead:
            return _("in %(time)s") % {"time": timeuntil(self.at, self.now, depth=1)}
        return _("%(time)s ago") % {"time": timesince(self.at, self.now, depth=1)}

    @property
    def exactly(self) -> str:
        """The moment to the second, with its time zone."""
        return f"{local(self.at):%Y-%m-%d %H:%M:%S %Z}".strip() if self.at else ""

    @property
    def html(self) -> SafeString:
        """The age, with the exact moment as a tooltip."""
        if self.at is None:
            return format_html("{}", self.age)
        return format_html(
            '<time datetime="{}" title="{}">{}</time>', self.at.isoformat(), self.exactly, self.age
        )


def local(moment: datetime) -> datetime:
    """The moment in the current time zone; as it is where a project does without them."""
    return localtime(moment) if is_aware(moment) else moment


INTERRUPTED: Final = "interrupted"
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
    """The state of a record as the admin's queryset reads it: one of ``STATES``."""
    ends = record.lease_expires_at or record.created_at + GRACE
    if record.status != Status.IN_PROGRESS or ends > record.now:
        return str(record.status)
    return HELD if record.hold else INTERRUPTED


def logged(members: Sequence[Member]) -> list[Entry]:
    """What was done in the admin to members that are rows of one table, and by whom.

    The log has the clock of the server that the operator used, not the database's.

    Args:
        members: those that the admin shows; it logs which row of a table it changed, and not in
            which database.
    """
    if not (members and apps.is_installed("django.contrib.admin")):
        return []
    by_pk = {str(member.row.pk): member for member in members}
    content_type = apps.get_model("contenttypes", "ContentType").objects.get_for_model(
        members[0].row
    )
    log = apps.get_model("admin", "LogEntry").objects.filter(
        content_type=content_type, object_id__in=list(by_pk)
    )
    return [
        Entry(
            at=entry.action_time,
            now=member.row.now,
            what=entry.get_change_message() or str(entry.get_action_flag_display()),
            member=member,
            by=entry.user.get_username(),
        )
        for entry in log.select_related("user").order_by("action_time", "pk")
        if (member := by_pk.get(str(entry.object_id)))
    ]


def lives(members: Sequence[Member], shown: Confidential) -> Iterator[Entry]:
    """What happened to members that are rows of records.

    One query for each database reads their steps; two more, if confidential things are shown.
    """
    # In the order in which it may have happened at one moment.
    yield from (_entry(member, *next(moments(member.row))) for member in members)
    for using, group in groupby(sorted(members, key=attrgetter("where")), attrgetter("where")):
        yield from _steps({member.row.pk: member for member in group}, using, shown)
    for member in members:
        yield from (_entry(member, *moment) for moment in islice(moments(member.row), 1, None))


def _entry(member: Member, what: str, at: Any) -> Entry:
    return Entry(at=at, now=member.row.now, what=what, member=member)


def moments(record: Any) -> Iterator[tuple[str, Any]]:
    """What happened to a record, besides its steps, and when; ``None``: never. It begins first."""
    yield _begun(record), record.created_at
    if record.completed_at:
        yield record.get_status_display(), record.completed_at
    if record.lease_expires_at:
        over = record.lease_expires_at <= record.now
        yield _("lease ended") if over else _("lease ends"), record.lease_expires_at
    if record.last_replayed_at:
        yield _replays(record.replay_count), record.last_replayed_at
    if record.status != Status.FAILED:  # whose key is free already
        yield _("expires"), record.expires_at
    if record.purge_at and state_of(record) != HELD:
        yield _("may be purged"), record.purge_at


def _begun(record: Any) -> str:
    if record.attempt == 1:
        return _("created")
    return _("attempt %(attempt)d began") % {"attempt": record.attempt}


def _replays(count: int) -> str:
    return ngettext("replayed", "replayed %(count)d times, last", count) % {"count": count}


def _steps(members: dict[Any, Member], using: str, shown: Confidential) -> Iterator[Entry]:
    steps = list(
        IdempotencyStep.objects.using(using)
        .filter(record__in=list(members))
        .order_by("record", "position")
        .annotate(failed=~Q(failure=""))
        .defer("result", "failure")
    )
    results = _results(members, using, shown)
    derived = _derived(members, using, steps) if shown.derived and steps else {}
    for step in steps:
        member = members[step.record_id]
        yield Entry(
            at=step.completed_at,
            now=member.row.now,
            what=_named(step),
            member=member,
            result=results.get(step.pk, ""),
            derived=derived.get(step.record_id, {}).get(step.name, ""),
        )


def _named(step: Any) -> str:
    values = {"place": step.position + 1, "name": step.name, "attempt": step.attempt}
    if step.failed:
        return _("step %(place)d, %(name)s, failed in attempt %(attempt)d") % values
    return _("step %(place)d, %(name)s, by attempt %(attempt)d") % values


def _results(members: dict[Any, Member], using: str, shown: Confidential) -> dict[Any, str]:
    """What the steps of the one record returned or failed with, by the step."""
    chosen = [pk for pk, member in members.items() if member.reference == shown.results_of]
    if not chosen:
        return {}
    steps = IdempotencyStep.objects.using(using).filter(record__in=chosen)
    columns = ("pk", "failure", "result")
    return {pk: failure or result for pk, failure, result in steps.values_list(*columns)}


def _derived(
    members: dict[Any, Member], using: str, steps: Sequence[Any]
) -> dict[Any, dict[str, str]]:
    """The keys that steps gave other services if each derived one of its own name, by record."""
    names: dict[Any, list[str]] = {}
    for step in steps:
        names.setdefault(step.record_id, []).append(step.name)
    rows = IdempotencyKey.objects.using(using).filter(pk__in=list(names))
    found = {}
    for pk, fingerprint in rows.values_list("pk", "fingerprint"):
        member = members[pk]
        try:
            found[pk] = derived_keys(
                scope=member.scope, key=member.key, fingerprint=fingerprint, names=names[pk]
            )
        except ValueError:  # sealed under a secret that is no longer known
            continue
    return found


UNREACHABLE: Final = (StoreUnavailable, OperationalError, InterfaceError)
"""Errors of a place that cannot be asked now."""


class Source(Protocol):
    """Finds the members of one kind, each in as few queries as there are places to look.

    A source with several places skips one that cannot be reached, and adds it to ``unreachable``.
    """

    def by_name(self, name: str, scope: str | None, unreachable: set[str]) -> Iterable[Member]:
        """The members with this key or message id, in this scope or in any."""

    def by_reference(self, reference: str, unreachable: set[str]) -> Iterable[Member]:
        """The members with this reference: several, if they are in several places."""

    def of(self, row: Any) -> Member | None:
        """The member that is a row of a table; ``None``: it is of another source, or is gone."""

    def caused_by(
        self, members: Collection[Member], limit: int, unreachable: set[str]
    ) -> Iterable[Member]:
        """The members whose cause is one of these: the oldest ones, at most ``limit``."""

    def entries(self, members: Sequence[Member], shown: Confidential) -> Iterable[Entry]:
        """What happened to members of this source."""


_sources: dict[type[Source], Source] = {}


def register(source: Source) -> None:
    """Have timelines include what a source finds. A second one of its class replaces the first."""
    _sources[type(source)] = source


def sources() -> list[Source]:
    """The sources that are registered, in the order of their registration."""
    return list(_sources.values())


def find(name: str, scope: str | None = None) -> tuple[list[Member], list[str]]:
    """The members with a key or message id, and what could not be asked for them.

    Args:
        name: the key or message id.
        scope: the scope that it is in; ``None``: any scope of any database.
    """
    unreachable: set[str] = set()
    found = [member for source in sources() for member in source.by_name(name, scope, unreachable)]
    return found, sorted(unreachable)


def member_of(row: Any) -> Member | None:
    """The member that is a row of a table; ``None``: no source knows the row."""
    return next((found for source in sources() if (found := source.of(row))), None)


MISSING: Final = "missing"
"""The kind of a member that is referred to, and that no source has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A record or a message in a chain of causes.

    Attributes:
        kind: what it is: ``"record"``, ``"outbox message"``, ``"inbox message"`` or ``"missing"``.
        reference: what its children name as their cause; see :func:`~..records.reference`.
        title: what is done, for people.
        state: how far it is, for people.
        caused_by: the reference of its cause; empty: it has none, or nobody knows.
        since: when it came to be, or its last attempt began; ``None``: unknown.
        where: the alias of the database that it is in, or of the store if that is none.
        row: the row as its source has read it; ``None``: it is none of a database.
        source: the source that knows what happened to it; ``None``: it is missing.
    """

    kind: str
    reference: str
    title: str
    state: str = ""
    caused_by: str = ""
    since: datetime | None = None
    where: str = ""
    row: Any = field(default=None, compare=False, repr=False)
    source: Any = field(default=None, compare=False, repr=False)

    @classmethod
    def missing(cls, reference: str) -> Member:
        """What a child names as its cause, and nobody has."""
        return cls(kind=MISSING, reference=reference, title=referred(reference)[0])

    @property
    def key(self) -> str:
        """Its key or message id."""
        return referred(self.reference)[0]

    @property
    def scope(self) -> str:
        """Its scope."""
        return referred(self.reference)[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry(Moment):
    """What happened to a member, or will happen.

    Attributes:
        at: when, by the clock of the member's database; ``None``: never, or see ``timed``.
        now: that clock when the member was read.
        what: what happened, for people.
        member: what it happened to.
        by: the user who did it; empty: nobody in the admin.
        result: what came of it, as JSON; only of steps, and for those who may see answers.
        derived: the key that the step gave another service if it called ``derive_key()`` with its
            own name; for those who may see answers.
        timed: whether its time is known; a store outside of a database tells none.
    """

    what: str
    member: Member
    by: str = ""
    result: str = ""
    derived: str = ""
    timed: bool = True

    @property
    def ahead(self) -> bool:
        """Whether it is yet to come."""
        return self.timed and Moment(self.at, self.now).ahead

    @property
    def age(self) -> str:
        """How long ago it was or how far ahead it is, in the largest unit."""
        return Moment(self.at, self.now).age if self.timed else _("at an unknown time")


@dataclass(frozen=True, slots=True)
class Confidential:
    """What of a timeline only those see who may see answers.

    Attributes:
        derived: whether the keys are shown that steps gave other services.
        results_of: the reference of the record whose results of steps are shown; empty: of none.
    """

    derived: bool = False
    results_of: str = ""


@dataclass(frozen=True, slots=True)
class Timeline:
    """A chain of causes, and what happened in it.

    Attributes:
        focus: the member that was asked for.
        members: the members with their depth in the chain: each cause before its effects.
        entries: what happened, in order of time; what has no time is at the end.
        more: whether members were left out, because a timeline holds no more.
        unreachable: what could not be asked for members, such as ``"store 'redis'"``.
    """

    focus: Member
    members: tuple[tuple[int, Member], ...]
    entries: tuple[Entry, ...]
    more: bool = False
    unreachable: tuple[str, ...] = ()


def in_order(entries: Iterable[Entry], members: Sequence[Member]) -> tuple[Entry, ...]:
    """The entries in order of time; at one moment, in the order of the members and of the source.

    Some databases tell time in milliseconds, in which an operation can have caused another.
    """
    places = {member: place for place, member in enumerate(members)}
    return tuple(sorted(entries, key=lambda entry: (*by_time(entry.at), places[entry.member])))


def by_time(at: datetime | None) -> tuple[bool, float]:
    """What sorts by time, with what has none at the end."""
    return at is None, 0.0 if at is None else at.timestamp()


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


MOST: Final = 200
"""Members that a timeline holds. A chain that a batch job began may have a hundred thousand."""

DEEPEST: Final = 50
"""Causes that are followed one after the other, in each direction."""

_Place = tuple[str, str, str]


def trace(focus: Member, shown: Confidential = Confidential()) -> Timeline:  # frozen
    """The timeline of the chain that a member is in.

    Causes come first: up to the root, or ``DEEPEST`` of them. Then come what the member has caused,
    and what its causes have caused besides, generation by generation, up to ``MOST`` members.
    A cause that no source has is a member of the kind ``"missing"``.

    Args:
        focus: where to begin, from :func:`~.sources.find`.
        shown: what of it is confidential and shown nevertheless.
    """
    walk = _Walk(focus)
    walk.down([focus])
    walk.down(walk.causes)
    members = tuple(walk.ordered())
    return Timeline(
        focus=focus,
        members=members,
        entries=in_order(walk.entries(shown), [member for _, member in members]),
        more=walk.more,
        unreachable=tuple(sorted(walk.unreachable)),
    )


class _Walk:
    """What was found so far.

    Attributes:
        causes: the cause of the focus, its cause, and so on to the root.
        more: whether something was left out.
        unreachable: what could not be asked.
    """

    def __init__(self, focus: Member) -> None:
        self.more = False
        self.unreachable: set[str] = set()
        self.causes: list[Member] = []
        self._members: dict[_Place, Member] = {}
        self._followed: set[str] = set()
        self._members[_place(focus)] = focus
        self._up(focus)

    def _up(self, member: Member) -> None:
        while member.caused_by and len(self.causes) < DEEPEST:
            cause = self._cause(member.caused_by)
            if cause is None:  # a key that was used again may be caused by what it had caused
                return
            self.causes.append(cause)
            member = cause
        self.more = self.more or bool(member.caused_by)

    def _cause(self, reference: str) -> Member | None:
        """The member with this reference; ``None``: the walk has been there.

        A message and the record of what was done for it may have one reference.
        """
        known = any(member.reference == reference for member in self._members.values())
        for source in sources():
            new = [
                member
                for member in source.by_reference(reference, self.unreachable)
                if _place(member) not in self._members
            ]
            self._members.update((_place(member), member) for member in new)
            if new:
                return new[0]
        if known:
            return None
        missing = Member.missing(reference)
        self._members[_place(missing)] = missing
        return missing

    def down(self, generation: list[Member]) -> None:
        """Take in what these members have caused, and what that has caused, and so on."""
        for _generation in range(DEEPEST):
            asked = [member for member in generation if member.reference not in self._followed]
            if not asked:
                return
            self._followed.update(member.reference for member in asked)
            generation = list(self._effects(asked))
        self.more = self.more or bool(generation)

    def _effects(self, asked: list[Member]) -> Iterator[Member]:
        for source in sources():
            limit = MOST + 1  # one more than there is room for says that there are more
            for member in source.caused_by(asked, limit, self.unreachable):
                if _place(member) in self._members:
                    continue
                if len(self._members) >= MOST:
                    self.more = True
                    break
                self._members[_place(member)] = member
                yield member

    def ordered(self) -> Iterator[tuple[int, Member]]:
        """The members with their depth, each cause before its effects."""
        effects: dict[str, list[Member]] = {}
        for member in sorted(self._members.values(), key=_since):
            effects.setdefault(member.caused_by, []).append(member)
        known = {member.reference for member in self._members.values()}
        top = self.causes[-1] if self.causes else next(iter(self._members.values()))
        others = (m for m in self._members.values() if m.caused_by not in known)
        seen: set[_Place] = set()
        pending = [(0, member) for member in (*reversed(list(others)), top)]
        while pending:
            depth, member = pending.pop()
            if _place(member) in seen:
                continue
            seen.add(_place(member))
            yield depth, member
            below = effects.get(member.reference, ())
            pending += [(depth + 1, effect) for effect in reversed(below)]

    def entries(self, shown: Confidential) -> Iterable[Entry]:
        """What happened to all of them."""
        for source in sources():
            mine = [member for member in self._members.values() if member.source is source]
            if mine:
                yield from source.entries(mine, shown)


def _since(member: Member) -> tuple[object, ...]:
    return *by_time(member.since), member.reference


def _place(member: Member) -> _Place:
    return member.kind, member.reference, member.where


register(RecordSource())
