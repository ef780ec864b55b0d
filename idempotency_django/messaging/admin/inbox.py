"""The inbox in the admin: what came of each message, and what an operator can do about it.

Bodies, headers and errors carry personal data. They are fetched for holders of the permission
``idempotency_messaging.view_body`` only, on the page of one message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

from django.contrib import admin, messages
from django.contrib.admin import helpers
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.text import Truncator
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ...tracing.admin import TimelineMixin
from ...tracing.legible import indented
from ..databases import database
from ..inbox.messages import known_sources
from ..inbox.settling import NotSettled
from ..models import InboxMessage
from .changelist import BoundedPaginator, SourceFilter
from .settlements import SETTLEMENTS, Settlement

SECRET: Final = ("headers", "body", "error")
"""Columns that are fetched for holders of the permission ``view_body`` only."""


def _settle_selected(kind: Settlement) -> Callable[..., HttpResponse | None]:
    """The settlement as the list of messages offers it."""

    def action(page: Any, request: HttpRequest, rows: QuerySet[Any]) -> HttpResponse | None:
        chosen = list(rows)
        if "post" not in request.POST:
            return page.question(request, kind, chosen)  # type: ignore[no-any-return]
        page.settle(request, kind, chosen)
        return None

    action.__name__ = f"{kind.name}_selected"
    return admin.action(action, permissions=["settle"], description=kind.title)


@admin.register(InboxMessage)
class InboxMessageAdmin(TimelineMixin):
    """Lists and shows what was received, and what consumers have parked."""

    list_display = ("short_id", "source", "type", "state_shown", "attempts", "received_at")
    list_filter = ("state", SourceFilter)
    search_fields = ("message_id",)
    search_help_text = gettext_lazy("Finds messages whose id begins with this text.")
    ordering = ("-received_at",)
    sortable_by = ("received_at",)
    list_per_page = 50
    paginator = BoundedPaginator
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    actions = tuple(_settle_selected(kind) for kind in SETTLEMENTS)
    change_form_template = "admin/idempotency_messaging/inboxmessage/change_form.html"

    # What may be done.

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_view_body_permission(self, request: HttpRequest) -> bool:
        """Whether the user may see bodies, headers and errors."""
        return request.user.has_perm("idempotency_messaging.view_body")

    def has_settle_permission(self, request: HttpRequest) -> bool:
        """Whether the user may retry, reprocess and accept messages."""
        may_settle = request.user.has_perm("idempotency_messaging.settle_message")
        return may_settle and self.has_view_permission(request)

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest) -> bool:
        # Somebody who may filter by a column can find out what is in it.
        if lookup.partition("__")[0] in (*SECRET, "digest", "unique_digest"):
            return False
        return super().lookup_allowed(lookup, value, request)

    # What is shown.

    def get_queryset(self, request: HttpRequest) -> QuerySet[InboxMessage]:
        rows = InboxMessage.objects.using(database()).defer(*SECRET)
        return rows.order_by(*self.ordering)

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
        identity = ["message_id", "source", "type", "group"]
        state = ["state_shown", "attempts", "process_after", "received_at", "processed_at"]
        shown = ["error_shown", "headers_shown", "body_shown"]
        return [
            (None, {"fields": identity}),
            (_("State"), {"fields": [*state, "purge_at"]}),
            *(
                [(_("Content"), {"fields": shown})]
                if self.has_view_body_permission(request)
                else []
            ),
        ]

    @admin.display(description=gettext_lazy("message id"))
    def short_id(self, message: InboxMessage) -> str:
        return Truncator(message.message_id).chars(40)

    @admin.display(description=gettext_lazy("state"))
    def state_shown(self, message: InboxMessage) -> SafeString:
        css = "idempotency-held" if message.state in ("parked", "held") else ""
        return format_html('<span class="{}">{}</span>', css, message.get_state_display())

    @admin.display(description=gettext_lazy("error"))
    def error_shown(self, message: InboxMessage) -> str:
        return _preformatted(message.error) if message.error else "–"

    @admin.display(description=gettext_lazy("headers"))
    def headers_shown(self, message: InboxMessage) -> SafeString:
        return _preformatted("\n".join(f"{k}: {v}" for k, v in json.loads(message.headers)))

    @admin.display(description=gettext_lazy("body"))
    def body_shown(self, message: InboxMessage) -> SafeString:
        return _preformatted(indented(bytes(message.body).decode(errors="backslashreplace")))

    def render_change_form(
        self, request: HttpRequest, context: Any, *args: Any, **options: Any
    ) -> HttpResponse:
        message = options["obj"]
        may_settle = self.has_settle_permission(request)
        context |= {
            "subtitle": None,
            "buttons": [kind for kind in SETTLEMENTS if may_settle and kind.fits(message)],
        }
        return super().render_change_form(request, context, *args, **options)

    # What an operator does.

    def get_urls(self) -> list[URLPattern]:
        pages = [
            path(
                f"<path:object_id>/{kind.name}/",
                self.admin_site.admin_view(self.settle_view),
                {"kind": kind},
                name=f"idempotency_messaging_inboxmessage_{kind.name}",
            )
            for kind in SETTLEMENTS
        ]
        return [*pages, *super().get_urls()]

    def settle_view(self, request: HttpRequest, object_id: str, kind: Settlement) -> HttpResponse:
        """Settle one message, after asking."""
        if not self.has_settle_permission(request):
            raise PermissionDenied
        message = self.get_object(request, unquote(object_id))
        if message is None:
            raise Http404
        if request.method != "POST":
            return self.question(request, kind, [message], original=message)
        self.settle(request, kind, [message])
        page = "admin:idempotency_messaging_inboxmessage_change"
        site = self.admin_site.name
        return HttpResponseRedirect(reverse(page, args=[quote(message.pk)], current_app=site))

    def settle(
        self, request: HttpRequest, kind: Settlement, chosen: Sequence[InboxMessage]
    ) -> None:
        """Settle the messages, each in a transaction of its own, and say what came of it."""
        done: list[InboxMessage] = []
        for message in chosen:
            try:
                kind.settle(message.pk, by=request.user.get_username())
            except NotSettled as error:
                messages.warning(request, f"{message}: {error}")
            else:
                done.append(message)
        if done:
            user: Any = request.user
            LogEntry.objects.log_actions(user.pk, done, CHANGE, str(kind.logged))
            text = ngettext(
                "%(count)d message is handled again soon.",
                "%(count)d messages are handled again soon.",
                len(done),
            )
            messages.success(request, text % {"count": len(done)})

    def question(
        self,
        request: HttpRequest,
        kind: Settlement,
        chosen: Sequence[InboxMessage],
        original: InboxMessage | None = None,
    ) -> HttpResponse:
        """The page that says what follows, and asks."""
        context = {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "media": self.media,
            "title": kind.title,
            "kind": kind,
            "original": original,
            "chosen": [message for message in chosen if kind.fits(message)],
            "left_alone": [message for message in chosen if not kind.fits(message)],
            "action_checkbox_name": helpers.ACTION_CHECKBOX_NAME,
        }
        template = "admin/idempotency_messaging/inboxmessage/action.html"
        return TemplateResponse(request, template, context)


def _preformatted(text: str) -> SafeString:
    return format_html('<pre class="idempotency-content" tabindex="0">{}</pre>', text)
