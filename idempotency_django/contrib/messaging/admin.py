"""The tables of messaging in the admin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ...admin import Action, ListAdmin, preformatted
from . import settling
from .databases import database
from .inbox import INBOX, known_sources
from .models import InboxMessage, OutboxMessage, RunningProcess
from .outbox.relay import OUTBOX
from .outbox.topics import topics
from .queue import Queue


@dataclass(frozen=True, kw_only=True)
class MessageAction(Action):
    """One way to settle messages.

    Attributes:
        does: what it does to each, for :func:`~.settling.settle`.
    """

    does: str
    name: str
    short_description: Any
    effects: Sequence[Any]
    log: Any
    done: Any

    def fits(self, row: Any) -> bool:
        return settling.fits(row, self.does)

    def apply(
        self, rows: QuerySet[Any], given: Mapping[str, Any], by: str
    ) -> Sequence[tuple[Any, str]]:
        return settling.settle(rows, self.does, by=by)


INBOX_ACTIONS: Final = (
    MessageAction(
        name="retry",
        short_description=gettext_lazy("Retry messages"),
        effects=(
            gettext_lazy("A process of the inbox handles the message again soon."),
            gettext_lazy(
                "This is the next attempt at the same operation. Stored steps don't run again, "
                "and derived keys for other services stay the same."
            ),
            gettext_lazy("If it fails again, it becomes a dead letter again."),
        ),
        log=gettext_lazy("Retried."),
        done=gettext_lazy("handled again soon"),
        does="retry",
    ),
    MessageAction(
        name="discard",
        short_description=gettext_lazy("Discard dead letters"),
        effects=(
            gettext_lazy("The message is not handled."),
            gettext_lazy("You can reprocess it until it is purged."),
        ),
        log=gettext_lazy("Discarded."),
        done=gettext_lazy("discarded"),
        does="discard",
    ),
    MessageAction(
        name="reprocess",
        short_description=gettext_lazy("Reprocess messages"),
        effects=(
            gettext_lazy(
                "The handler runs again from the beginning, although it has succeeded before."
            ),
            gettext_lazy(
                "Its earlier writes to the database stay, and it writes them a second time."
            ),
            gettext_lazy("Its derived keys stay the same, so other services recognise the calls."),
        ),
        log=gettext_lazy("Reprocessed."),
        done=gettext_lazy("handled again soon"),
        does="repeat",
    ),
)

OUTBOX_ACTIONS: Final = (
    MessageAction(
        name="retry",
        short_description=gettext_lazy("Retry dead letters"),
        effects=(
            gettext_lazy("The message is sent with the same id. Its attempts are counted anew."),
            gettext_lazy(
                "Its group continues after it. If the broker refuses it again, it becomes a dead "
                "letter again."
            ),
        ),
        log=gettext_lazy("Retried; it is sent with the same id."),
        done=gettext_lazy("sent soon"),
        does="retry",
    ),
    MessageAction(
        name="discard",
        short_description=gettext_lazy("Discard dead letters"),
        effects=(
            gettext_lazy("The message is never sent, and its group continues without it."),
            gettext_lazy(
                "You can send it again until it is purged. It then comes after later messages."
            ),
        ),
        log=gettext_lazy("Discarded; its group continues without it."),
        done=gettext_lazy("discarded"),
        does="discard",
    ),
    MessageAction(
        name="resend",
        short_description=gettext_lazy("Send again with new ids"),
        effects=(
            gettext_lazy("A copy is sent with a new id, so consumers handle it again."),
            gettext_lazy("In its group, the copy comes after messages that were published since."),
        ),
        log=gettext_lazy("Sent again with a new id."),
        done=gettext_lazy("sent again soon"),
        does="repeat",
    ),
)


class KnownFilter(admin.AllValuesFieldListFilter):
    """By topic or source. The known ones are offered; to look for others would read all rows."""

    def choices(self, changelist: Any) -> Iterator[Any]:
        known: Any = sorted(changelist.model_admin.known())
        self.lookup_choices = known
        return super().choices(changelist)


class MessageAdmin(ListAdmin):
    """Lists and shows messages, and settles them.

    Attributes:
        queue: the table as a queue.
        known: the names of the topics or sources.
        identity: what its page shows of what it is.
        secret: the columns that only those see who may; the last one is the content.
    """

    queue: ClassVar[Queue]
    known: ClassVar[Callable[[], Iterable[str]]]
    identity: ClassVar[Sequence[str]]

    def stored(self) -> QuerySet[Any]:
        # PostgreSQL's index of what waits has no others.
        return self.queue.all(database()).filter(**{f"{self.queue.place}__gt": ""})

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        sections: list[Any] = [
            (None, {"fields": self.identity}),
            (_("State"), {"fields": ["state", "attempts"]}),
        ]
        if self.has_secret_permission(request):
            sections.append((_("Content"), {"fields": [*self.secret[:-1], "content"]}))
        return sections

    @admin.display(description=gettext_lazy("state"))
    def state_shown(self, message: Any) -> SafeString:
        shown = '<span class="idempotency-{}">{}</span>'
        return format_html(shown, message.state, message.get_state_display())

    @admin.display(description=gettext_lazy("content"))
    def content(self, message: Any) -> SafeString:
        content = getattr(message, self.secret[-1])
        if not isinstance(content, str):
            content = bytes(content).decode(errors="backslashreplace")
        return preformatted(content)


@admin.register(InboxMessage)
class InboxMessageAdmin(MessageAdmin):
    """Lists and shows what was received, and the dead letters of consumers."""

    queue = INBOX
    known = staticmethod(known_sources)
    actions = INBOX_ACTIONS
    settle_permission = "idempotency_messaging.settle_message"
    secret = ("error", "headers", "body")
    hidden = ("digest", "unique_digest", "caused_by")
    view_permission = "idempotency_messaging.view_body"
    identity = ("message_id", "source", "type")
    list_display = ("message_id", "state_shown", "type", "source", "attempts", "received_at")
    list_filter = ("state", ("source", KnownFilter))
    search_fields = ("message_id",)
    search_help_text = gettext_lazy("Finds messages whose id begins with this text.")
    ordering = ("-pk",)

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        if search_term:  # together with the sources, an index is used
            queryset = queryset.filter(
                source__in=known_sources(), message_id__startswith=search_term
            )
        return queryset, False


@admin.register(OutboxMessage)
class OutboxMessageAdmin(MessageAdmin):
    """Lists and shows messages, retries and discards dead letters, and sends again."""

    queue = OUTBOX
    known = staticmethod(topics)
    actions = OUTBOX_ACTIONS
    settle_permission = "idempotency_messaging.settle_outbox"
    secret = ("error", "payload")
    # What caused it is in the timeline, for those who may see that.
    hidden = ("token", "dedup", "caused_by")
    view_permission = "idempotency_messaging.view_outbox_payload"
    identity = ("message_id", "topic", "type", "group", "sequence")
    list_display = ("message_id", "state_shown", "type", "topic", "group", "attempts", "created_at")
    list_filter = ("state", ("topic", KnownFilter))
    search_fields = ("message_id__exact", "stream__exact")
    search_help_text = gettext_lazy("Finds an id, or a group as topic/group.")
    ordering = ("-pk",)


@admin.register(RunningProcess)
class RunningProcessAdmin(ListAdmin):
    """Lists the processes that run, hang, or were killed. Delete one that is not needed."""

    list_display = ("name", "process", "started_at", "beat_at")
    fields = readonly_fields = list_display
    ordering = ("name", "beat_at")

    def stored(self) -> QuerySet[Any]:
        return RunningProcess.objects.using(database())

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return admin.ModelAdmin.has_delete_permission(self, request, obj)
