"""A list of messages that opens as fast with ten million of them as with ten."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Final

from django.contrib import admin
from django.core.paginator import Paginator
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy

from ..inbox.messages import known_sources

COUNTED: Final = 10_000
"""Messages that a list counts and leads to; to find an older one, narrow the list down."""


class BoundedPaginator(Paginator):  # type: ignore[type-arg]  # not subscriptable at runtime
    """Counts up to ``COUNTED`` and no further."""

    @cached_property
    def count(self) -> int:
        rows: Any = self.object_list
        counted: int = rows.order_by().values("pk")[:COUNTED].count()
        return counted


class SourceFilter(admin.SimpleListFilter):
    """By source: the receivers', and those of consumers that have parked messages."""

    title = gettext_lazy("source")
    parameter_name = "source"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(source, source) for source in known_sources()]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset.filter(source=self.value()) if self.value() else queryset
