"""Lists that open as fast with ten million records as with ten."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, ClassVar, Final

from django.contrib.admin import ModelAdmin, SimpleListFilter
from django.contrib.admin.views.main import ChangeList
from django.db import connections
from django.db.models import DateTimeField, F, Max, Min, Q, QuerySet, Subquery, Value
from django.db.models.functions import Coalesce, Collate
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from ..contrib.timeline import HELD, INTERRUPTED, STATES, local
from ..models import GRACE, DatabaseNow, IdempotencyKeyQuerySet
from ..stores.records import Status
from .base import COUNTED

SAMPLED: Final = 1_000
"""The number of the newest records whose operations the filter offers."""
FOUND: Final = 100
"""The most records that a search finds by path or principal."""

_RECENT: Final = "found_among_the_newest"
_AFTER_ASCII: Final = "\x7f"
_THE_BEGINNING: Final = Value(datetime(1970, 1, 2, tzinfo=UTC), output_field=DateTimeField())


class AuditQuerySet(IdempotencyKeyQuerySet):
    """The records as the admin reads them."""

    def datetimes(self, field_name: str, kind: str, *args: Any, **options: Any) -> Any:
        """Every year, month or day from the first record to the last, for the date hierarchy.

        Django's own reads all records to leave out days without any; the first and the last are
        found by the index.
        """
        ends = self.aggregate(first=Min(field_name), last=Max(field_name))
        if ends["first"] is None:
            return []
        first, last = (local(end).date() for end in (ends["first"], ends["last"]))
        start: Any = {"year": {"month": 1, "day": 1}, "month": {"day": 1}, "day": {}}[kind]
        days = (first + timedelta(days=count) for count in range((last - first).days + 1))
        return sorted({day.replace(**start) for day in days})


class AuditChangeList(ChangeList):
    """A list without dates to lead on by, where it shows records that were found by their path.

    They are the newest, and a database that looks for the first of them may walk past all others.
    """

    def get_queryset(self, request: HttpRequest, *args: Any, **options: Any) -> QuerySet[Any]:
        rows: QuerySet[Any] = super().get_queryset(request, *args, **options)
        if _RECENT in rows.query.annotations and f"{self.date_hierarchy}__day" not in self.params:
            self.date_hierarchy = None
        return rows


def beginning_with(rows: QuerySet[Any], text: str) -> QuerySet[Any]:
    """The rows whose key, scope, path or principal begins with the text.

    Keys and scopes are ASCII and compared byte by byte, so that their indexes find them. LIKE would
    use no index on SQLite, which ignores case there, nor on MariaDB. Paths and principals have no
    index, which every protected request would pay for: they are looked for among the newest
    ``COUNTED`` of the rows, and up to ``FOUND`` are found.
    """
    if not text:
        return rows
    matching = Q()
    if text.isascii():
        beyond = text + _AFTER_ASCII
        postgresql = connections[rows.db].vendor == "postgresql"
        # As the index of the scopes is collated there.
        rows = rows.alias(sorted_scope=Collate("scope", "POSIX") if postgresql else F("scope"))
        matching = Q(key__gte=text, key__lt=beyond) | Q(
            sorted_scope__gte=text, sorted_scope__lt=beyond
        )
    by_path = Q(path__startswith=text) | Q(principal__startswith=text)
    recent = [row["pk"] for row in _among_the_newest(rows, by_path)]
    if recent:
        rows = rows.annotate(**{_RECENT: Value(True)})
        matching |= Q(pk__in=recent)
    return rows.filter(matching) if matching else rows.none()


def _among_the_newest(rows: QuerySet[Any], wanted: Q) -> QuerySet[Any, dict[str, Any]]:
    """The matching rows among the newest ones, in one bounded statement."""
    newest = rows.order_by("-created_at")
    oldest = newest.values("created_at")[COUNTED - 1 : COUNTED]
    within = newest.filter(created_at__gte=Coalesce(Subquery(oldest), _THE_BEGINNING))
    return within.filter(wanted).values("pk")[:FOUND]


class ChoiceFilter(SimpleListFilter):
    """A filter with a few choices, each of which narrows the list down."""

    choices_offered: ClassVar[dict[str, tuple[Any, Callable[[Any], Any]]]]

    def lookups(self, request: HttpRequest, model_admin: ModelAdmin[Any]) -> list[tuple[str, Any]]:
        return [(value, label) for value, (label, _narrow) in self.choices_offered.items()]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        chosen = self.choices_offered.get(self.value() or "")
        return queryset if chosen is None else chosen[1](queryset)


def in_state(rows: Any, state: str) -> Any:
    """The rows in one of ``STATES``."""
    if state not in (Status.IN_PROGRESS, INTERRUPTED, HELD):
        return rows.filter(status=state)
    over = "gt" if state == Status.IN_PROGRESS else "lte"
    wanted = Q(status=Status.IN_PROGRESS)
    if state != Status.IN_PROGRESS:
        wanted &= Q(hold=state == HELD)
    leased = Q(**{f"lease_expires_at__{over}": DatabaseNow()})
    unleased = Q(lease_expires_at=None, **{f"created_at__{over}": DatabaseNow() - GRACE})
    # Rows without a lease are rare, and no index leads to them: look among the newest.
    rare = [row["pk"] for row in _among_the_newest(rows, wanted & unleased)]
    return rows.filter(wanted, leased | Q(pk__in=rare))


class StateFilter(ChoiceFilter):
    """By what the list says of their status."""

    title = _("status")
    parameter_name = "state"
    choices_offered: ClassVar = {
        state: (name, partial(in_state, state=state)) for state, name in STATES.items()
    }


class OperationFilter(SimpleListFilter):
    """By operation; offers those of the newest records, as all would take reading them all."""

    title = _("operation")
    parameter_name = "operation"

    def lookups(self, request: HttpRequest, model_admin: ModelAdmin[Any]) -> list[tuple[str, Any]]:
        newest = model_admin.get_queryset(request).order_by("-created_at")
        names = {*newest.values_list("operation", flat=True)[:SAMPLED], self.value() or ""}
        return [(name, name) for name in sorted(names - {""})]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        name = self.value()
        return queryset if name is None else queryset.filter(operation=name)


class ExpiryFilter(ChoiceFilter):
    """Live records, expired ones, and those that the next purge deletes."""

    title = _("expiry")
    parameter_name = "expiry"
    choices_offered: ClassVar = {
        "live": (
            _("live"),
            lambda rows: rows.filter(Q(expires_at=None) | Q(expires_at__gt=DatabaseNow())),
        ),
        "expired": (_("expired"), lambda rows: rows.expired()),
        "purgeable": (_("purgeable"), lambda rows: rows.purgeable()),
    }


def _completed(rows: Any, *, tombstone: bool) -> Any:
    return rows.filter(status=Status.COMPLETED, response_body__isnull=tombstone)


class ResponseFilter(ChoiceFilter):
    """Completed records whose response was kept, and tombstones."""

    title = _("response")
    parameter_name = "response"
    choices_offered: ClassVar = {
        "stored": (_("stored"), partial(_completed, tombstone=False)),
        "tombstone": (_("tombstone"), partial(_completed, tombstone=True)),
    }
