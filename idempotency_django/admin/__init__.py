"""The admin of idempotency keys: inspect requests, and complete or release interrupted ones.

Stored responses, results of steps and errors carry personal data, and a fingerprint is a digest of
such data. They are fetched for holders of the permission ``idempotency_django.view_response`` only,
on the page of one record. No list shows them, searches or filters by them.
"""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern, path
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from ..contrib.timeline import (
    CONFIDENTIAL,
    HELD,
    STATES,
    Confidential,
    Moment,
    administered,
    state_of,
)
from ..models import INTERRUPTED, IdempotencyKey, IdempotencyKeyQuerySet
from ..stores.records import Status, reference
from .actions import ACTIONS
from .base import Action, ListAdmin
from .changelist import OperationFilter, StateFilter, beginning_with
from .responses import StoredResponse, derived_keys_page
from .text import cut, indented, preformatted, two_lines

__all__ = [
    "Action",
    "IdempotencyKeyAdmin",
    "ListAdmin",
    "cut",
    "indented",
    "preformatted",
    "two_lines",
]


@admin.register(IdempotencyKey)
class IdempotencyKeyAdmin(ListAdmin):
    """Lists and shows the records, where the default store writes them."""

    operations = ACTIONS
    settle_permission = "idempotency_django.settle"
    secret = CONFIDENTIAL
    view_permission = "idempotency_django.view_response"
    list_display = (
        "key_cut",
        "status_shown",
        "operation_and_scope",
        "created",
        "expires",
        "attempt",
        "replay_count",
    )
    ordering = ("-pk",)
    list_filter = (StateFilter, OperationFilter)
    search_fields = ("key", "scope", "path", "principal")
    search_help_text = _(
        "Finds keys that begin with this text. Among the newest 100,000 records, it also finds the "
        "last 100 with a matching scope, path or principal."
    )
    change_form_template = "admin/idempotency_django/idempotencykey/change_form.html"

    # What is read.

    def stored(self) -> QuerySet[Any]:
        rows: QuerySet[Any] = IdempotencyKeyQuerySet(IdempotencyKey, using=administered())
        with_body: QuerySet[Any] = rows.annotate(has_body=Q(response_body__isnull=False))
        return with_body

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        return beginning_with(queryset, search_term.strip()), False

    # What is shown.

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        fields = ["key", "scope", "operation", "principal", "request_line"]
        if self.has_secret_permission(request):
            fields.append("fingerprint")
        return [
            (_("Request"), {"fields": fields}),
            (_("State"), {"fields": ["status_shown", "attempt"]}),
        ]

    @admin.display(description=_("key"))
    def key_cut(self, record: Any) -> SafeString:
        return cut(record.key, 40)

    @admin.display(description=_("operation and scope"))
    def operation_and_scope(self, record: Any) -> SafeString:
        return two_lines(record.operation, record.scope)

    @admin.display(description=_("status"))
    def status_shown(self, record: Any) -> SafeString:
        tombstone = record.status == Status.COMPLETED and not record.has_body
        state = state_of(record)
        return format_html(
            '<span class="idempotency-{}">{}</span> {} <span class="quiet">{}</span>',
            state,
            STATES[state],
            record.response_status if record.path and record.response_status else "",
            _("tombstone") if tombstone else "",
        )

    @admin.display(description=_("created"))
    def created(self, record: Any) -> SafeString:
        return Moment(record.created_at, record.now).html

    @admin.display(description=_("expires"), empty_value="–")
    def expires(self, record: Any) -> SafeString | None:
        if record.status == Status.FAILED:  # its key is free already
            return None
        return Moment(record.expires_at, record.now).html

    @admin.display(description=_("request"))
    def request_line(self, record: Any) -> str:
        return f"{record.method} {record.path}".strip()

    def confidential(self, request: HttpRequest, row: Any) -> Confidential:
        if not self.has_secret_permission(request):
            return Confidential()
        return Confidential(derived=True, results_of=reference(row.key, row.scope))

    def render_change_form(
        self, request: HttpRequest, context: Any, *args: Any, **options: Any
    ) -> HttpResponse:
        record = options["obj"]
        context |= {
            "may_view_response": self.has_secret_permission(request),
            "interrupted": state_of(record) in (INTERRUPTED, HELD),
        }
        if context["may_view_response"]:
            # From where the record is; a deferred column comes from a router's.
            rows = self.get_queryset(request).filter(pk=record.pk)
            record.fingerprint = rows.values_list("fingerprint", flat=True).first() or ""
            context["response"] = StoredResponse.of(rows)
        return super().render_change_form(request, context, *args, **options)

    def get_urls(self) -> list[URLPattern]:
        page = path(
            "<path:object_id>/derived_keys/",
            self.admin_site.admin_view(self.derived_keys_view),
            name="idempotency_django_idempotencykey_derived_keys",
        )
        return [page, *super().get_urls()]

    def derived_keys_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Show the keys that the handler of one record derived."""
        # With a derived key or a fingerprint, a guess at the request can be tested.
        if not (self.has_view_permission(request) and self.has_secret_permission(request)):
            raise PermissionDenied
        record = self.row_or_404(request, object_id)
        rows = self.get_queryset(request).filter(pk=record.pk)
        return derived_keys_page(self, request, rows, record)
