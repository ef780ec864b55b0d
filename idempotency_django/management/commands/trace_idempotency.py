"""``manage.py trace_idempotency``"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Iterator
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError

from ...contrib.timeline import DEEPEST, MISSING, MOST, Confidential, Timeline, find, local, trace


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
            "the key is in several chains, or in a store outside of the database.",
        )
        parser.add_argument(
            "--format",
            choices=["text", "json"],
            default="text",
            help="The output format: text, or one JSON object (default: text).",
        )

    def handle(self, *, name: str, scope: str | None, **options: Any) -> None:
        try:
            timeline = _timeline(name, scope)
        except ImproperlyConfigured as error:
            raise CommandError(str(error)) from error
        if options["format"] == "json":
            self.stdout.write(json.dumps(_document(timeline), indent=2, ensure_ascii=False))
        else:
            self.stdout.write("\n".join(_lines(timeline)))


def _timeline(name: str, scope: str | None) -> Timeline:
    """The only timeline that contains a record or message with this name."""
    members, unreachable = find(name, scope)
    if not members:
        raise CommandError(_nothing(name, scope, unreachable))
    timeline = trace(members[0], Confidential(derived=True))
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
    if scope is None:
        text += " For a store outside of the database, pass --scope."
    return f"{text} It may have been purged or rolled back."


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
    for place in timeline.unreachable:
        yield f"  Unavailable, so entries may be missing: the {place}."
    yield ""
    yield "Timeline"
    for entry in timeline.entries:
        when = local(entry.at).isoformat(" ", "microseconds") if entry.at else entry.age
        by = f" (by {entry.by})" if entry.by else ""
        yield f"  {when:<32}  [{numbers[entry.member]:>{width}}] {entry.what}{by}"
        if entry.derived:
            yield f"{'':<38}derived key, if the step derived one of its name: {entry.derived}"


def _document(timeline: Timeline) -> dict[str, Any]:
    numbers = {member: number for number, (_, member) in enumerate(timeline.members)}
    return {
        "focus": numbers[timeline.focus],
        "members": [
            {
                "kind": member.kind,
                "title": member.title,
                "state": member.state,
                "key": member.key,
                "scope": member.scope,
                "where": member.where,
                "caused_by": member.caused_by,
                "depth": depth,
            }
            for depth, member in timeline.members
        ],
        "entries": [
            {
                "at": entry.at.isoformat() if entry.at else None,
                "what": entry.what,
                "member": numbers[entry.member],
                "by": entry.by,
                "derived_key": entry.derived,
                "ahead": entry.ahead,
            }
            for entry in timeline.entries
        ],
        "more": timeline.more,
        "unreachable": list(timeline.unreachable),
    }
