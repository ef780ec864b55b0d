"""The admin of idempotency keys: what became of a request, and how to settle an interrupted one.

Stored answers, results of steps and errors carry personal data, and a fingerprint is a digest of
such data. They are fetched for holders of the permission ``idempotency_django.view_answer`` only,
on the page of one record; nobody can list them, search or filter by them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.contrib import admin
from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied
from django.db.models import Q, QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.urls import URLPattern, path
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from ..models import DatabaseNow, IdempotencyKey
from ..records import Status, reference
from ..timeline import (
    CONFIDENTIAL,
    HELD,
    INTERRUPTED,
    STATES,
    Confidential,
    Moment,
    administered,
    cut,
    state_of,
)
from .actions import ACTIONS, Action, list_action, perform_on_one
from .answers import Answer, show_derived_keys
from .changelist import (
    AnswerFilter,
    AuditChangeList,
    AuditQuerySet,
    BoundedPaginator,
    CopiesFilter,
    ExpiryFilter,
    OperationFilter,
    StateFilter,
    beginning_with,
)
from .timeline import TimelineMixin


@admin.register(IdempotencyKey)
class IdempotencyKeyAdmin(TimelineMixin):
    """Lists and shows the records, where the default store writes them."""

    list_display = (
        "key_cut",
        "status_shown",
        "operation_and_scope",
        "created",
        "expires",
        "attempt",
        "replay_count",
    )
    # Opening the list must cost the same however many records there are, so nothing here counts,
    # sorts or searches without an index.
    sortable_by = ("created",)
    ordering = ("-created_at",)
    list_filter = (StateFilter, OperationFilter, ExpiryFilter, AnswerFilter, CopiesFilter)
    date_hierarchy = "created_at"
    search_fields = ("key", "scope", "path", "principal")
    search_help_text = _(
        "Finds keys and scopes that begin with this text; also, among the newest 10,000 records, "
        "the last 100 whose path or principal does. To look among older ones, choose a day first."
    )
    list_per_page = 50
    paginator = BoundedPaginator
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER

    actions = tuple(list_action(kind) for kind in ACTIONS if kind.for_many)
    change_form_template = "admin/idempotency_django/idempotencykey/change_form.html"

    # What may be done.

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_view_answer_permission(self, request: HttpRequest) -> bool:
        """Whether the user may see answers, errors, results of steps and fingerprints."""
        return request.user.has_perm("idempotency_django.view_answer")

    def has_settle_permission(self, request: HttpRequest) -> bool:
        """Whether the user may settle what was interrupted."""
        may_settle = request.user.has_perm("idempotency_django.settle")
        return may_settle and self.has_view_permission(request)

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest) -> bool:
        # Somebody who may filter by a column can find out what is in it.
        if lookup.partition("__")[0] in CONFIDENTIAL:
            return False
        return super().lookup_allowed(lookup, value, request)

    # What is read.

    def get_changelist(self, request: HttpRequest, **options: Any) -> type[AuditChangeList]:
        return AuditChangeList

    def get_queryset(self, request: HttpRequest) -> AuditQuerySet:
        rows: AuditQuerySet = AuditQuerySet(IdempotencyKey, using=administered()).annotate(
            now=DatabaseNow(), has_body=Q(response_body__isnull=False)
        )
        return rows.defer(*CONFIDENTIAL)

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        return beginning_with(queryset, search_term.strip()), False

    # What is shown.

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        fields = ["key", "scope", "operation", "principal", "request_line"]
        if self.has_view_answer_permission(request):
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
        return format_html(
            '<div>{}</div><div class="quiet">{}</div>',
            cut(record.operation, 60),
            cut(record.scope, 60),
        )

    @admin.display(description=_("status"))
    def status_shown(self, record: Any) -> SafeString:
        tombstone = record.status == Status.COMPLETED and not record.has_body
        state = state_of(record)
        return format_html(
            '<span class="idempotency-{}">{}</span> {} <span class="quiet">{}</span>',
            state,
            STATES[state],
            record.response_status or "",
            _("tombstone") if tombstone else "",
        )

    @admin.display(description=_("created"), ordering="created_at")
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
        if not self.has_view_answer_permission(request):
            return Confidential()
        return Confidential(derived=True, results_of=reference(row.key, row.scope))

    def render_change_form(
        self, request: HttpRequest, context: Any, *args: Any, **options: Any
    ) -> HttpResponse:
        obj = options["obj"]
        may_view_answer = self.has_view_answer_permission(request)
        rows = self.get_queryset(request).filter(pk=obj.pk)
        if may_view_answer:  # from where the record is; a deferred column comes from a router's
            obj.fingerprint = rows.values_list("fingerprint", flat=True).first() or ""
        allowed = [kind([obj]) for kind in ACTIONS if kind.button and self._may(kind, request)]
        context |= {
            "subtitle": None,  # the key and the scope, which the page shows
            "may_view_answer": may_view_answer,
            "answer": Answer.of(rows) if may_view_answer else None,
            "buttons": [action for action in allowed if action.offers(obj)],
            "interrupted": state_of(obj) in (INTERRUPTED, HELD),
        }
        return super().render_change_form(request, context, *args, **options)

    # What an operator does.

    def get_urls(self) -> list[URLPattern]:
        views: list[tuple[str, Callable[..., HttpResponse], dict[str, Any]]] = [
            *((kind.name, self.action_view, {"kind": kind}) for kind in ACTIONS),
            ("derived_keys", self.derived_keys_view, {}),
        ]
        pages = (
            path(
                f"<path:object_id>/{name}/",
                self.admin_site.admin_view(view),
                arguments,
                name=f"idempotency_django_idempotencykey_{name}",
            )
            for name, view, arguments in views
        )
        return [*pages, *super().get_urls()]

    def action_view(self, request: HttpRequest, object_id: str, kind: type[Action]) -> HttpResponse:
        """Do something to one record, after asking."""
        if not self._may(kind, request):
            raise PermissionDenied
        record, rows = self._record(request, object_id)
        return perform_on_one(self, request, rows, record, kind)

    def derived_keys_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Show the keys that the handler of one record derived."""
        # With a derived key, as with a fingerprint, a guess at what was asked for can be tested.
        if not (self.has_view_permission(request) and self.has_view_answer_permission(request)):
            raise PermissionDenied
        record, rows = self._record(request, object_id)
        return show_derived_keys(self, request, rows, record)

    def _may(self, kind: type[Action], request: HttpRequest) -> bool:
        """Whether the user may do this, to whatever record."""
        return bool(getattr(self, f"has_{kind.permission}_permission")(request))

    def _record(self, request: HttpRequest, object_id: str) -> tuple[Any, QuerySet[Any]]:
        """The record with this quoted key, and the rows that hold nothing but it."""
        record = self.get_object(request, unquote(object_id))
        if record is None:
            raise Http404
        return record, self.get_queryset(request).filter(pk=record.pk)
