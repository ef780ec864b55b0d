"""The admin of idempotency keys: inspect requests, and settle interrupted ones.

Stored responses, results of steps and errors carry personal data, and a fingerprint is a digest of
such data. They are fetched for holders of the permission ``idempotency_django.view_response`` only,
on the page of one record. No list shows them, searches or filters by them.
"""

from __future__ import annotations

from http.client import responses as reasons
from typing import Any

from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from ..contrib.timeline import CONFIDENTIAL, HELD, STATES, Moment, administered, state_of
from ..models import INTERRUPTED, IdempotencyKey, IdempotencyKeyQuerySet, IdempotencyStep
from ..stores import Status, decode, derived_key, reference
from .actions import ACTIONS
from .base import Action, ListAdmin
from .changelist import StateFilter, beginning_with
from .text import LONGEST_TEXT, cut, preformatted, two_lines

__all__ = ["Action", "IdempotencyKeyAdmin", "ListAdmin", "cut", "preformatted", "two_lines"]


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
    list_filter = (StateFilter,)
    search_fields = ("key", "scope", "operation", "path", "principal")
    search_help_text = _(
        "Finds keys that begin with this text. Among the newest 100,000 records, it also finds the "
        "last 100 with a matching scope, operation, path or principal."
    )
    change_form_template = "admin/idempotency_django/idempotencykey/change_form.html"

    def has_remove_permission(self, request: HttpRequest) -> bool:
        """Whether the user may delete records."""
        may = request.user.has_perm("idempotency_django.delete_idempotencykey")
        return may and self.has_view_permission(request)

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
            (_("Status"), {"fields": ["status_shown", "attempt"]}),
        ]

    @admin.display(description=_("key"))
    def key_cut(self, record: Any) -> SafeString:
        return cut(record.key, 40)

    @admin.display(description=_("operation and scope"))
    def operation_and_scope(self, record: Any) -> SafeString:
        return two_lines(record.operation, record.scope)

    @admin.display(description=_("status"))
    def status_shown(self, record: Any) -> SafeString:
        without_body = record.status == Status.COMPLETED and not record.has_body
        state = state_of(record)
        return format_html(
            '<span class="idempotency-{}">{}</span> {} <span class="quiet">{}</span>',
            state,
            STATES[state],
            record.response_status if record.path and record.response_status else "",
            _("response not stored") if without_body else "",
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
            rows = self.get_queryset(request).filter(pk=record.pk)
            context |= _response(rows) | _derived(rows, request.GET.get("name", ""))
            record.fingerprint = context["fingerprint"]
        return super().render_change_form(request, context, *args, **options)


def _response(rows: QuerySet[Any]) -> dict[str, Any]:
    """The stored response of the one record, or what its last attempt failed with, as text."""
    columns = ("response_status", "response_headers", "response_body", "error", "path")
    stored = rows.values_list(*columns).first()
    if stored is None:  # it has been purged since
        return {}
    code, headers, body, error, path = stored
    payload = decode(code, headers, body)
    return {
        "error": error,
        "response": code is not None,
        "status": f"{code} {reasons.get(code, '')}".strip() if path else _("Result"),
        "headers": payload.headers if path else (),
        "body": payload.body,
        "text": (payload.body or b"").decode(errors="backslashreplace")[:LONGEST_TEXT],
    }


def _derived(rows: QuerySet[Any], name: str) -> dict[str, Any]:
    """The keys that the handler of the one record derived, by name: of its steps, and of a name
    that was typed.
    """
    known = rows.values("pk", "key", "scope", "fingerprint").first()
    if known is None:
        return {"fingerprint": ""}
    steps = IdempotencyStep.objects.using(rows.db).filter(record=known.pop("pk")).order_by("pk")
    names = dict.fromkeys([*steps.values_list("name", flat=True), *filter(None, [name])])
    return {
        "fingerprint": known["fingerprint"],
        "derived": {each: derived_key(**known, name=each) for each in names},
        "name": name,
    }
