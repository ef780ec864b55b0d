"""The walk through a chain of causes: up to its root, and down to all that came of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from .sources import sources
from .timelines import Confidential, Entry, Member, Timeline, by_time, in_order

MOST: Final = 200
"""Members that a timeline holds. A chain that a batch job began may have a hundred thousand."""

DEEPEST: Final = 50
"""Causes that are followed one after the other, in each direction."""

_Place = tuple[str, str, str]


def trace(focus: Member, shown: Confidential = Confidential()) -> Timeline:  # noqa: B008  # frozen
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
        for _ in range(DEEPEST):
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
