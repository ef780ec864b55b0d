"""``manage.py trace_idempotency``"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from ...contrib.timeline import MISSING, Member, Timeline, find, trace


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

    def handle(self, *, name: str, **options: Any) -> None:
        found = find(name)
        if not found:
            raise CommandError(
                f"No record and no message has the key or id {name!r}. It may have been purged or "
                "rolled back, or is in a store without a database."
            )
        shown: set[Member] = set()
        for member in found:
            if member not in shown:
                timeline = trace(member)
                shown.update(each for _, each in timeline.members)
                self.stdout.write("\n".join(_lines(timeline)))


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
        yield f"  Only {len(numbers)} are listed."
    yield ""
    yield "Timeline"
    for entry in timeline.entries:
        by = f" (by {entry.by})" if entry.by else ""
        yield f"  {entry.exactly:<32}  [{numbers[entry.member]:>{width}}] {entry.what}{by}"
