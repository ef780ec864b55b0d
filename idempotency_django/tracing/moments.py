"""Moments as people see them: how long ago, and exactly when."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.timesince import timesince, timeuntil
from django.utils.timezone import is_aware, localtime
from django.utils.translation import gettext as _


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
