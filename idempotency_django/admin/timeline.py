"""What happened to a record, and when, by the database's clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Q
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.timesince import timesince, timeuntil
from django.utils.timezone import is_aware, localtime
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ..models import IdempotencyStep
from ..records import Status
from .answers import indented
from .states import HELD, state_of


@dataclass(frozen=True, slots=True)
class Event:
    """What happened, or will happen, at a moment.

    Attributes:
        what: the event, in a word or two.
        at: the moment; ``None``: never.
        now: the database's clock when the record was read.
        result: what came of it, as text, for those who may see it.
    """

    what: str
    at: datetime | None
    now: datetime
    result: str = ""

    @property
    def ahead(self) -> bool:
        """Whether it is yet to come."""
        return self.at is None or self.at > self.now

    @property
    def age(self) -> str:
        """How long ago it was or how far ahead it is, in the largest unit."""
        if self.at is None:
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


def timeline(record: Any, steps: Iterable[Event] = ()) -> list[Event]:
    """The life of a record as the admin's queryset reads it, in order of time, with its steps."""
    moments = [(_created(record), record.created_at)]
    if record.completed_at:
        moments.append((record.get_status_display(), record.completed_at))
    if record.lease_expires_at:
        over = record.lease_expires_at <= record.now
        moments.append((_("lease ended") if over else _("lease ends"), record.lease_expires_at))
    if record.last_replayed_at:
        moments.append((_replays(record.replay_count), record.last_replayed_at))
    if record.status != Status.FAILED:  # whose key is free already
        moments.append((_("expires"), record.expires_at))
    if record.purge_at and state_of(record) != HELD:
        moments.append((_("may be purged"), record.purge_at))
    events = [*steps, *(Event(what, at, record.now) for what, at in moments)]
    return sorted(events, key=lambda event: (event.at is None, event.at))


def steps_of(record: Any, using: str, *, with_results: bool) -> list[Event]:
    """The recovery points of a record, in their order."""
    steps = IdempotencyStep.objects.using(using).filter(record=record.pk).order_by("position")
    return [
        Event(
            _step(step),
            step.completed_at,
            record.now,
            indented(step.failure or step.result) if with_results else "",
        )
        for step in steps.annotate(failed=~Q(failure="")).defer(
            *(() if with_results else ("result", "failure"))
        )
    ]


def _step(step: Any) -> str:
    values = {"place": step.position + 1, "name": step.name, "attempt": step.attempt}
    if step.failed:
        return _("step %(place)d, %(name)s, failed in attempt %(attempt)d") % values
    return _("step %(place)d, %(name)s, by attempt %(attempt)d") % values


def _created(record: Any) -> str:
    if record.attempt == 1:
        return _("created")
    return _("attempt %(attempt)d began") % {"attempt": record.attempt}


def _replays(count: int) -> str:
    return ngettext("replayed", "replayed %(count)d times, last", count) % {"count": count}
