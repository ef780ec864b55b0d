"""The inbox in the admin: what came of each message, and what an operator can do about it.

Bodies, headers and errors carry personal data. They are fetched for holders of the permission
``idempotency_messaging.view_body`` only, on the page of one message.
"""

from __future__ import annotations

import json
from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ...tracing.legible import indented
from ..inbox.messages import known_sources
from ..models import InboxMessage
from .base import MessageAdmin, preformatted
from .changelist import SourceFilter
from .settlements import INBOX


@admin.register(InboxMessage)
class InboxMessageAdmin(MessageAdmin):
    """Lists and shows what was received, and what consumers have parked."""

    secret = ("headers", "body", "error")
    hidden = ("digest", "unique_digest")
    since = "received_at"
    settlements = INBOX
    settle_permission = "idempotency_messaging.settle_message"
    list_filter = ("state", SourceFilter)
    search_fields = ("message_id",)
    search_help_text = gettext_lazy("Finds messages whose id begins with this text.")
    ordering = ("-received_at",)

    def has_view_body_permission(self, request: HttpRequest) -> bool:
        """Whether the user may see bodies, headers and errors."""
        return request.user.has_perm("idempotency_messaging.view_body")

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        if not search_term:
            return queryset, False
        # With the sources, there is an index for it.
        return queryset.filter(
            source__in=known_sources(), message_id__startswith=search_term
        ), False

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        shown = ["error_shown", "headers_shown", "body_shown"]
        may_see = self.has_view_body_permission(request)
        return [
            (None, {"fields": ["message_id", "source", "type", "group"]}),
            (_("State"), {"fields": ["state_shown", "attempts"]}),
            *([(_("Content"), {"fields": shown})] if may_see else []),
        ]

    @admin.display(description=gettext_lazy("error"))
    def error_shown(self, message: InboxMessage) -> str:
        return preformatted(message.error) if message.error else "–"

    @admin.display(description=gettext_lazy("headers"))
    def headers_shown(self, message: InboxMessage) -> SafeString:
        return preformatted("\n".join(f"{k}: {v}" for k, v in json.loads(message.headers)))

    @admin.display(description=gettext_lazy("body"))
    def body_shown(self, message: InboxMessage) -> SafeString:
        return preformatted(indented(bytes(message.body).decode(errors="backslashreplace")))
