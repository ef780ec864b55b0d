"""The outbox in the admin: what waits, what is blocked, and what to do about it."""

from __future__ import annotations

from typing import Any, ClassVar

from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.core.paginator import Paginator
from django.db.models import Exists, OuterRef, Q, QuerySet
from django.http import HttpRequest
from django.utils.functional import cached_property
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ...tracing.admin import TimelineMixin
from ..databases import database
from ..models import OutboxMessage, OutboxStream
from ..models.outbox import OutboxState
from ..outbox import settling

SECRET = ("payload", "headers", "error")
"""Columns that only holders of the permission ``view_outbox_payload`` see."""


COUNTED = 10_000
"""Messages that a list counts and leads to; to find an older one, narrow the list down."""


class _BoundedPaginator(Paginator):  # type: ignore[type-arg]  # not subscriptable at runtime
    """Counts up to ``COUNTED`` and no further: a list opens as fast with ten million messages."""

    @cached_property
    def count(self) -> int:
        rows: Any = self.object_list
        counted: int = rows.order_by().values("pk")[:COUNTED].count()
        return counted


class _ReadOnly(admin.ModelAdmin):  # type: ignore[type-arg]  # not subscriptable at runtime
    """Rows that only the package writes."""

    list_per_page = 50
    paginator = _BoundedPaginator
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        rows: QuerySet[Any] = self.model._base_manager.using(database())
        return rows.order_by(*(self.ordering or ("pk",)))


@admin.register(OutboxMessage)
class OutboxMessageAdmin(TimelineMixin, _ReadOnly):
    """Lists and shows messages, retries and skips what is blocked, and sends again."""

    list_display = (
        "message_id",
        "topic",
        "type",
        "group",
        "sequence",
        "state",
        "attempts",
        "created_at",
    )
    list_filter = ("state", "topic")
    search_fields = ("message_id__exact", "group__exact", "caused_by__exact")
    ordering = ("-pk",)
    sortable_by = ()
    actions = ("retry_selected", "skip_selected", "resend_selected")
    # What caused it is in the timeline, for those who may see that.
    identity: ClassVar[list[str]] = ["message_id", "topic", "type", "group", "sequence"]
    state: ClassVar[list[str]] = [
        "state",
        "attempts",
        "process_after",
        "created_at",
        "sent_at",
        "purge_at",
        "dedup_until",
    ]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).defer(*SECRET)

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        content = [(gettext_lazy("Content"), {"fields": SECRET})]
        return [
            (None, {"fields": self.identity}),
            (gettext_lazy("State"), {"fields": self.state}),
            *(content if self.has_payload_permission(request) else []),
        ]

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest) -> bool:
        # Somebody who may filter by a column can find out what is in it.
        if lookup.partition("__")[0] in (*SECRET, "token", "dedup", "caused_by"):
            return False
        return super().lookup_allowed(lookup, value, request)

    def has_payload_permission(self, request: HttpRequest) -> bool:
        """Whether the user may see payloads, headers and errors."""
        return request.user.has_perm("idempotency_messaging.view_outbox_payload")

    def has_settle_permission(self, request: HttpRequest) -> bool:
        """Whether the user may retry, skip and send again."""
        may_settle = request.user.has_perm("idempotency_messaging.settle_outbox")
        return may_settle and self.has_view_permission(request)

    @admin.action(permissions=["settle"], description=gettext_lazy("Retry blocked messages"))
    def retry_selected(self, request: HttpRequest, rows: QuerySet[Any]) -> None:
        """Have blocked messages sent again, under their ids."""
        self._note(request, rows, OutboxState.BLOCKED, _("Retried; it is sent under its old id."))
        self._say(request, settling.retry(rows))

    @admin.action(permissions=["settle"], description=gettext_lazy("Skip blocked messages"))
    def skip_selected(self, request: HttpRequest, rows: QuerySet[Any]) -> None:
        """Give blocked messages up; their groups go on."""
        self._note(request, rows, OutboxState.BLOCKED, _("Skipped; its group goes on without it."))
        self._say(request, settling.skip(rows))

    @admin.action(
        permissions=["settle"],
        description=gettext_lazy("Send again, under new ids: consumers handle them once more"),
    )
    def resend_selected(self, request: HttpRequest, rows: QuerySet[Any]) -> None:
        """Publish what was sent once more."""
        self._note(request, rows, OutboxState.SENT, _("Sent again, under a new id."))
        self._say(request, len(settling.resend(rows)))

    def _note(
        self, request: HttpRequest, rows: QuerySet[Any], state: OutboxState, text: str
    ) -> None:
        chosen = rows.filter(state=state).defer(*SECRET)
        LogEntry.objects.log_actions(request.user.pk or 0, chosen, CHANGE, text)

    def _say(self, request: HttpRequest, done: int) -> None:
        if not done:
            text = _("Nothing was changed: no selected message is in the state for this.")
            self.message_user(request, text, messages.WARNING)
            return
        text = ngettext("%(count)d message was changed.", "%(count)d messages were changed.", done)
        self.message_user(request, text % {"count": done}, messages.SUCCESS)


@admin.register(OutboxStream)
class OutboxStreamAdmin(_ReadOnly):
    """Lists groups, and how far their relays are behind."""

    list_display = ("stream", "last_sequence", "waiting", "is_blocked")
    search_fields = ("stream__startswith",)
    sortable_by = ()

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        blocked = OutboxMessage.objects.filter(stream=OuterRef("stream"), state=OutboxState.BLOCKED)
        rows: QuerySet[Any] = super().get_queryset(request)
        annotated: QuerySet[Any] = rows.annotate(blocked=Exists(blocked))
        return annotated

    @admin.display(description=gettext_lazy("not sent yet"))
    def waiting(self, stream: OutboxStream) -> int:
        """How many of its messages are not sent."""
        unsent = Q(state__in=[OutboxState.PENDING, OutboxState.BLOCKED])
        rows = OutboxMessage.objects.using(database()).filter(unsent, stream=stream.stream)
        return rows.count()

    @admin.display(description=gettext_lazy("blocked"), boolean=True)
    def is_blocked(self, stream: Any) -> bool:
        """Whether it waits for an operator."""
        return bool(stream.blocked)
