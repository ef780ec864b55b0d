"""Lists that open as fast with ten million records as with ten."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final, cast

from django.contrib.admin import ModelAdmin, SimpleListFilter
from django.contrib.admin.views.main import ChangeList
from django.core.paginator import Paginator
from django.db import connections
from django.db.models import DateTimeField, F, Max, Min, Q, QuerySet, Subquery, Value
from django.db.models.functions import Coalesce, Collate
from django.http import HttpRequest
from django.utils.functional import cached_property
from django.utils.translation import gettext_lazy as _

from ..models import DatabaseNow, IdempotencyKeyQuerySet
from ..records import Status
from ..timeline import STATES, UNFINISHED, in_state, local, with_lease, without_lease

COUNTED: Final = 10_000
"""Records that a list counts and leads to; to find an older one, narrow the list down."""
SAMPLED: Final = 1_000
"""The newest records, whose operations the filter offers."""
FOUND: Final = 100
"""Records that are found by their path or principal."""

COPIES: Final = "copies:"
"""What the scopes of the copies of a Celery task begin with."""

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


class BoundedPaginator(Paginator):  # type: ignore[type-arg]  # not subscriptable at runtime
    """Counts up to ``COUNTED`` and no further."""

    @cached_property
    def counted(self) -> int:
        """The number of records; more than ``COUNTED`` when there are more."""
        rows = cast("QuerySet[Any]", self.object_list)
        return rows.order_by().values("pk")[: COUNTED + 1].count()

    @cached_property
    def count(self) -> int:
        return min(self.counted, COUNTED)

    @property
    def has_more(self) -> bool:
        """Whether there are records that no page leads to."""
        return self.counted > COUNTED


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
    recent = [row["pk"] for row in _recently_by(rows, text)]
    if recent:
        rows = rows.annotate(**{_RECENT: Value(True)})
        matching |= Q(pk__in=recent)
    return rows.filter(matching) if matching else rows.none()


def _recently_by(rows: QuerySet[Any], text: str) -> QuerySet[Any, dict[str, Any]]:
    """The newest rows whose path or principal begins with the text."""
    return _among_the_newest(rows, Q(path__startswith=text) | Q(principal__startswith=text))


def _is_rare(state: str) -> Q:
    return without_lease(state) & Q(status=Status.IN_PROGRESS)


def _among_the_newest(rows: QuerySet[Any], wanted: Q) -> QuerySet[Any, dict[str, Any]]:
    """Those of the newest rows that are wanted, in one bounded statement."""
    newest = rows.order_by("-created_at")
    oldest = newest.values("created_at")[COUNTED - 1 : COUNTED]
    within = newest.filter(created_at__gte=Coalesce(Subquery(oldest), _THE_BEGINNING))
    return within.filter(wanted).values("pk")[:FOUND]


class StateFilter(SimpleListFilter):
    """By what the list says of their status."""

    title = _("status")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: ModelAdmin[Any]) -> list[tuple[str, Any]]:
        return list(STATES.items())

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        state = self.value()
        if state not in UNFINISHED:
            return in_state(queryset, state) if state in STATES else queryset
        rows = queryset.filter(status=Status.IN_PROGRESS)
        # Rows without a lease are rare, and no index leads to them: look among the newest.
        rare = [row["pk"] for row in _among_the_newest(queryset, _is_rare(state))]
        return rows.filter(with_lease(state) | Q(pk__in=rare) if rare else with_lease(state))


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


class CopiesFilter(SimpleListFilter):
    """Without, or only, the records by which a task that waits sends each copy of itself once."""

    title = _("copies of tasks")
    parameter_name = "copies"

    def lookups(self, request: HttpRequest, model_admin: ModelAdmin[Any]) -> list[tuple[str, Any]]:
        return [("without", _("without them")), ("only", _("only them"))]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        copies = Q(scope__gte=COPIES, scope__lt=COPIES + _AFTER_ASCII)
        match self.value():
            case "without":  # a copy is remembered for an hour, so few are in the way
                return queryset.exclude(copies)
            case "only":
                return queryset.filter(copies)
            case _:
                return queryset


class ExpiryFilter(SimpleListFilter):
    """Live records, expired ones, and those that the next purge deletes."""

    title = _("expiry")
    parameter_name = "expiry"

    def lookups(self, request: HttpRequest, model_admin: ModelAdmin[Any]) -> list[tuple[str, Any]]:
        return [("live", _("live")), ("expired", _("expired")), ("purgeable", _("purgeable"))]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        match self.value():
            case "live":
                return queryset.filter(Q(expires_at=None) | Q(expires_at__gt=DatabaseNow()))
            case "expired":
                return queryset.expired()
            case "purgeable":
                return queryset.purgeable()
            case _:
                return queryset


class AnswerFilter(SimpleListFilter):
    """Completed records whose answer was kept, and tombstones."""

    title = _("answer")
    parameter_name = "answer"

    def lookups(self, request: HttpRequest, model_admin: ModelAdmin[Any]) -> list[tuple[str, Any]]:
        return [("stored", _("stored")), ("tombstone", _("tombstone"))]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        if self.value() not in ("stored", "tombstone"):
            return queryset
        return queryset.filter(
            status=Status.COMPLETED, response_body__isnull=self.value() == "tombstone"
        )
