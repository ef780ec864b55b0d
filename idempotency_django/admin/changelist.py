"""Lists that open as fast with ten million records as with ten: what they find, an index leads to,
or it is among the newest records.
"""

from __future__ import annotations

from typing import Any, Final

from django.contrib.admin import ModelAdmin, SimpleListFilter
from django.db.models import Q, QuerySet, Subquery
from django.db.models.functions import Coalesce
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from ..contrib.timeline import HELD, STATES
from ..models import DatabaseNow, IdempotencyKey
from ..stores import Status

NEWEST: Final = 100_000
"""The number of the newest records that a filter or a search looks at, where no index helps."""
FOUND: Final = 100
"""The most records that a search finds by what has no index."""

_AFTER_ASCII: Final = "\x7f"


def among_the_newest(rows: QuerySet[Any]) -> QuerySet[Any]:
    """Those of the rows that are among the newest records."""
    newest = IdempotencyKey._base_manager.using(rows.db).order_by("-pk").values("pk")
    return rows.filter(pk__gte=Coalesce(Subquery(newest[NEWEST - 1 : NEWEST]), 0))


def beginning_with(rows: QuerySet[Any], text: str) -> QuerySet[Any]:
    """The rows whose key, scope, operation, path or principal begins with the text.

    Keys are ASCII and compared byte by byte, so that their index finds them. LIKE would use no
    index on SQLite, which ignores case there, nor on MariaDB. The others have no index, which every
    protected request would pay for: up to ``FOUND`` are found among the newest records.
    """
    if not text:
        return rows
    matching = Q()
    for column in ("operation", "path", "principal"):
        matching |= Q(**{f"{column}__startswith": text})
    keyed = Q()
    if text.isascii():
        beyond = text + _AFTER_ASCII
        matching |= Q(scope__gte=text, scope__lt=beyond)
        keyed = Q(key__gte=text, key__lt=beyond)
    recent = among_the_newest(rows).filter(matching).order_by("-pk").values_list("pk", flat=True)
    return rows.filter(Q(pk__in=list(recent[:FOUND])) | keyed)


def in_state(rows: Any, state: str) -> Any:
    """The rows in one of ``STATES``."""
    if state == Status.COMPLETED:  # as most are
        return rows.filter(status=state)
    if state == Status.FAILED:
        return among_the_newest(rows).filter(status=state)
    unfinished = rows.filter(status=Status.IN_PROGRESS)
    if state == Status.IN_PROGRESS:
        return unfinished.filter(lease_expires_at__gt=DatabaseNow())
    return unfinished.filter(lease_expires_at__lte=DatabaseNow(), hold=state == HELD)


class StateFilter(SimpleListFilter):
    """By what the list says of their status."""

    title = _("status")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: ModelAdmin[Any]) -> list[tuple[str, Any]]:
        return list(STATES.items())

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        state = self.value()
        return in_state(queryset, state) if state in STATES else queryset
