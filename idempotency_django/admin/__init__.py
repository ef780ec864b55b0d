"""The admin of idempotency keys: inspect requests, and settle interrupted ones.

Stored responses, results of steps and errors carry personal data, and a fingerprint is a digest of
such data. They are fetched for holders of the permission ``idempotency_django.view_response`` only,
on the page of one record. No list shows them, searches or filters by them.

The list opens as fast with ten million records as with ten: what it finds, an index leads to, or it
is among the newest records.
"""

from __future__ import annotations

from http.client import responses as reasons
from typing import Any, Final

from django.contrib import admin
from django.db.models import Q, QuerySet, Subquery
from django.db.models.functions import Coalesce
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from ..contrib.timeline import CONFIDENTIAL, HELD, STATES, administered, state_of
from ..models import (
    INTERRUPTED,
    DatabaseNow,
    IdempotencyKey,
    IdempotencyKeyQuerySet,
    IdempotencyStep,
)
from ..stores import Status, decode, derived_key, reference
from .actions import Settle
from .base import LONGEST_TEXT, Action, ListAdmin, preformatted

__all__ = ["Action", "IdempotencyKeyAdmin", "ListAdmin", "preformatted"]

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


class StateFilter(admin.SimpleListFilter):
    """By what the list says of their status."""

    title = _("status")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return list(STATES.items())

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        state = self.value()
        return in_state(queryset, state) if state in STATES else queryset


@admin.register(IdempotencyKey)
class IdempotencyKeyAdmin(ListAdmin):
    """Lists and shows the records, where the default store writes them."""

    actions = (Settle(),)
    settle_permission = "idempotency_django.settle"
    secret = CONFIDENTIAL
    view_permission = "idempotency_django.view_response"
    list_display = (
        "key",
        "status_shown",
        "operation",
        "created_at",
        "attempt",
        "replay_count",
    )
    ordering = ("-pk",)
    list_filter = (StateFilter,)
    search_fields = ("key", "scope", "operation", "path", "principal")
    search_help_text = _(
        "Finds keys that begin with this text. Among the newest 100,000 records, it also finds the "
        "last 100 with a matching scope, operation, path or principal."
    )
    fields = (
        *("key", "scope", "operation", "principal", "method", "path"),
        *("status_shown", "attempt", "replay_count"),
    )
    change_form_template = "admin/idempotency_django/idempotencykey/change_form.html"

    def stored(self) -> QuerySet[Any]:
        return IdempotencyKeyQuerySet(IdempotencyKey, using=administered())

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        return beginning_with(queryset, search_term.strip()), False

    @admin.display(description=_("status"))
    def status_shown(self, record: Any) -> SafeString:
        state, code = state_of(record), record.response_status if record.path else None
        shown = '<span class="idempotency-{}">{}</span> {}'
        return format_html(shown, state, STATES[state], code or "")

    def results_of(self, request: HttpRequest, row: Any) -> str:
        return reference(row.key, row.scope) if self.has_secret_permission(request) else ""

    def render_change_form(
        self, request: HttpRequest, context: Any, *args: Any, **options: Any
    ) -> HttpResponse:
        record = options["obj"]
        context["may_view_response"] = self.has_secret_permission(request)
        context["interrupted"] = state_of(record) in (INTERRUPTED, HELD)
        if context["may_view_response"]:
            # From where the record is; a deferred column comes from a router's.
            rows = self.get_queryset(request).filter(pk=record.pk).defer(None)
            context |= _confidential(get_object_or_404(rows), request.GET.get("name", ""))
        return super().render_change_form(request, context, *args, **options)


def _confidential(record: Any, name: str) -> dict[str, Any]:
    """The stored response of a record or what its last attempt failed with, its fingerprint, and
    the keys that its handler derived: by the names of its steps, and by a name that was typed.
    """
    code = record.response_status
    payload = decode(code, record.response_headers, record.response_body)
    known = {"scope": record.scope, "key": record.key, "fingerprint": record.fingerprint}
    steps = IdempotencyStep.objects.using(record._state.db).filter(record=record).order_by("pk")
    names = dict.fromkeys([*steps.values_list("name", flat=True), *filter(None, [name])])
    return {
        "error": record.error,
        "fingerprint": record.fingerprint,
        "response": code is not None,
        "status": f"{code} {reasons.get(code, '')}".strip() if record.path else _("Result"),
        "headers": payload.headers if record.path else (),
        "body": payload.body,
        "text": (payload.body or b"").decode(errors="backslashreplace")[:LONGEST_TEXT],
        "derived": {each: derived_key(**known, name=each) for each in names},
        "name": name,
    }
