"""``manage.py trace_idempotency``"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError

from ...contrib.timeline import DEEPEST, MISSING, MOST, Member, Timeline, find, trace
from ...stores import derived_key


class Command(BaseCommand):
    """Prints the timeline of a request or message and its effects."""

    help = (
        "Prints the chain of causes and effects of a key or message, and its events in order of "
        "time. It does not print stored responses."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "name", metavar="KEY|MESSAGE_ID", help="An idempotency key, or the id of a message."
        )
        parser.add_argument(
            "--scope",
            help="The scope of the key; for a message, outbox:TOPIC or inbox:SOURCE. Required if "
            "the key is in several chains.",
        )
        parser.add_argument(
            "--derive",
            metavar="NAME",
            help="Also print the key that derive_key(NAME) gave to another service.",
        )

    def handle(self, *, name: str, scope: str | None, derive: str | None, **options: Any) -> None:
        try:
            timeline = _timeline(name, scope)
        except ImproperlyConfigured as error:
            raise CommandError(str(error)) from error
        self.stdout.write("\n".join(_lines(timeline)))
        if derive:
            self.stdout.write(f"\nderive_key({derive!r}): {_derived(timeline.focus, derive)}")


def _timeline(name: str, scope: str | None) -> Timeline:
    """The only timeline that contains a record or message with this name."""
    members, unreachable = find(name, scope)
    if not members:
        raise CommandError(_nothing(name, scope, unreachable))
    timeline = trace(members[0])
    if not {member for _, member in timeline.members}.issuperset(members):
        scopes = sorted({member.scope for member in members})
        listed = "\n".join(f"  --scope '{scope}'" for scope in scopes)
        raise CommandError(f"{name!r} is in several chains of causes. Choose one:\n{listed}")
    return timeline


def _nothing(name: str, scope: str | None, unreachable: list[str]) -> str:
    where = "in any scope" if scope is None else f"in the scope {scope!r}"
    text = f"No record and no message has the key or id {name!r} {where}."
    if unreachable:
        return (
            f"{text} Unavailable: {', '.join(unreachable)}. Check that they are running and "
            "migrated (manage.py migrate)."
        )
    return f"{text} It may have been purged or rolled back, or is in a store without a database."


def _derived(member: Member, name: str) -> str:
    if member.kind != "record":
        raise CommandError("Only a record derives keys. Name it by its key, and --scope.")
    known = {"scope": member.scope, "key": member.key, "fingerprint": member.row.fingerprint}
    return derived_key(**known, name=name)


def _lines(timeline: Timeline) -> Iterator[str]:
    numbers = {member: number for number, (_, member) in enumerate(timeline.members, 1)}
    width = len(str(len(numbers)))
    yield "Causes"
    for depth, member in timeline.members:
        mark = "*" if member == timeline.focus else " "
        described = f"{member.title} ({member.kind}, {member.state}): {member.key}  {member.scope}"
        if member.kind == MISSING:
            described = f"purged, rolled back or elsewhere: {member.reference}"
        yield f"{mark} [{numbers[member]:>{width}}] {'  ' * depth}{described}"
    if timeline.more:
        yield (
            f"  Only {len(numbers)} are listed. A timeline has at most {MOST} members, and at "
            f"most {DEEPEST} causes or effects in a row."
        )
    if timeline.unreachable:
        yield f"  Unavailable, so entries may be missing: {', '.join(timeline.unreachable)}."
    yield ""
    yield "Timeline"
    for entry in timeline.entries:
        by = f" (by {entry.by})" if entry.by else ""
        when = entry.exactly or entry.age
        yield f"  {when:<32}  [{numbers[entry.member]:>{width}}] {entry.what}{by}"
