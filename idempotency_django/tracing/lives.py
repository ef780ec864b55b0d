"""What happened to records that are in a database: attempts, steps, answer, replays, expiry."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from operator import attrgetter
from typing import Any

from django.db.models import Q
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ..models import IdempotencyKey, IdempotencyStep
from ..policy.seals import derived_keys
from ..records import Status
from .states import HELD, state_of
from .timelines import Confidential, Entry, Member


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
