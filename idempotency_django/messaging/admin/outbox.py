"""The outbox in the admin: what waits, what is blocked, and what to do about it."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import Exists, OuterRef, Q, QuerySet
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ...tracing.legible import indented
from ..databases import database
from ..models import OutboxMessage, OutboxStream
from ..models.outbox import OutboxState
from .base import MessageAdmin, ReadOnly, preformatted
from .settlements import OUTBOX


@admin.register(OutboxMessage)
class OutboxMessageAdmin(MessageAdmin):
    """Lists and shows messages, retries and skips what is blocked, and sends again."""

    secret = ("payload", "headers", "error")
    hidden = ("token", "dedup", "caused_by")
    since = "created_at"
    settlements = OUTBOX
    settle_permission = "idempotency_messaging.settle_outbox"
    list_filter = ("state", "topic")
    search_fields = ("message_id__exact", "group__exact", "caused_by__exact")
    ordering = ("-pk",)

    def has_payload_permission(self, request: HttpRequest) -> bool:
        """Whether the user may see payloads, headers and errors."""
        return request.user.has_perm("idempotency_messaging.view_outbox_payload")

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        # What caused it is in the timeline, for those who may see that.
        shown = ["error_shown", "headers_shown", "payload_shown"]
        may_see = self.has_payload_permission(request)
        return [
            (None, {"fields": ["message_id", "topic", "type", "group", "sequence"]}),
            (_("State"), {"fields": ["state_shown", "attempts"]}),
            *([(_("Content"), {"fields": shown})] if may_see else []),
        ]

    @admin.display(description=gettext_lazy("error"))
    def error_shown(self, message: OutboxMessage) -> str:
        return preformatted(message.error) if message.error else "–"

    @admin.display(description=gettext_lazy("headers"))
    def headers_shown(self, message: OutboxMessage) -> SafeString:
        return preformatted(indented(message.headers))

    @admin.display(description=gettext_lazy("payload"))
    def payload_shown(self, message: OutboxMessage) -> SafeString:
        return preformatted(indented(message.payload))


@admin.register(OutboxStream)
class OutboxStreamAdmin(ReadOnly):
    """Lists groups, and how far their relays are behind."""

    list_display = ("stream", "last_sequence", "waiting", "state")
    search_fields = ("stream__startswith",)

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

    @admin.display(description=gettext_lazy("state"))
    def state(self, stream: Any) -> SafeString:
        """Whether it waits for an operator."""
        if stream.blocked:
            return format_html('<span class="idempotency-held">{}</span>', _("blocked"))
        return format_html("{}", _("free"))
