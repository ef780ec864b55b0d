"""What a timeline is made of: the members of a chain of causes, and what happened to each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from django.utils.translation import gettext as _

from ..records import referred
from .moments import Moment

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
