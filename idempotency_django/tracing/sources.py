"""Where members of chains are found: each kind of record or message has a source."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final, Protocol

from django.db import InterfaceError, OperationalError

from ..errors import StoreUnavailable
from .timelines import Confidential, Entry, Member

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
