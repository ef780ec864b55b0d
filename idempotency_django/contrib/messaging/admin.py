"""The tables of messaging in the admin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ...admin import Action, ListAdmin, preformatted
from . import settling
from .databases import database
from .inbox.processing import known_sources
from .models import Heartbeat, InboxMessage, MessageState, OutboxMessage


@dataclass(frozen=True, kw_only=True)
class MessageAction(Action):
    """One way to settle messages.

    Attributes:
        does: what it does to each, for :func:`~.settling.settle`.
    """

    does: str
    name: str
    title: Any
    button: Any
    effects: Sequence[Any]
    log: Any
    done: Any

    def refusal(self, row: Any, given: Mapping[str, Any]) -> str:
        if settling.fits(row, self.does):
            return ""
        text = _("Its state is “%(state)s”, so this action does not apply.")
        return text % {"state": row.get_state_display()}

    def apply(self, rows: Sequence[Any], given: Mapping[str, Any], by: str) -> Mapping[Any, str]:
        refusals = {}
        for row in rows:
            try:
                settling.settle(row, self.does, by=by)
            except settling.NotSettled as error:
                refusals[row.pk] = str(error)
        return refusals


@dataclass(frozen=True, kw_only=True)
class AlikeAction(MessageAction):
    """Settles, with a dead letter, all others of its topic or source that have the same error."""

    for_many = False

    def offers(self, row: Any) -> bool:
        return row.state == MessageState.DEAD and super().offers(row)

    def consequences(self, rows: Sequence[Any]) -> Sequence[str]:
        [row] = rows
        text = _("This is done to all dead letters with this error and topic or source: %(count)d.")
        count = settling.alike(row).count()
        return [text % {"count": count}, *map(str, self.effects)]

    def apply(self, rows: Sequence[Any], given: Mapping[str, Any], by: str) -> Mapping[Any, str]:
        [row] = rows
        settled, refusals = settling.settle_all(settling.alike(row), self.does, by=by)
        return {} if settled else {row.pk: " ".join(refusals)}


def _alike(action: MessageAction, button: Any) -> AlikeAction:
    """The action, on all dead letters that are like the letter that the page is of."""
    log = gettext_lazy("Settled, with all others that have the same error.")
    names = {"name": f"{action.name}_alike", "title": button, "button": button, "log": log}
    return AlikeAction(**{**vars(action), **names})


RETRY_ALIKE: Final = gettext_lazy("Retry all with this error")
DISCARD_ALIKE: Final = gettext_lazy("Discard all with this error")

INBOX: Final = (
    MessageAction(
        name="retry",
        title=gettext_lazy("Retry messages"),
        button=gettext_lazy("Retry"),
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
        title=gettext_lazy("Discard dead letters"),
        button=gettext_lazy("Discard"),
        effects=(
            gettext_lazy("The message is not handled, and its group continues without it."),
            gettext_lazy("You can reprocess it until it is purged."),
        ),
        log=gettext_lazy("Discarded; its group continues without it."),
        done=gettext_lazy("discarded"),
        does="discard",
    ),
    MessageAction(
        name="reprocess",
        title=gettext_lazy("Reprocess messages"),
        button=gettext_lazy("Reprocess"),
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
    MessageAction(
        name="accept",
        title=gettext_lazy("Accept messages"),
        button=gettext_lazy("Accept"),
        effects=(
            gettext_lazy(
                "An earlier message had the same id with another body, or the same body with "
                "another id that the signature does not cover. Ask the sender whether both are "
                "genuine."
            ),
            gettext_lazy("An accepted message is handled like any other."),
        ),
        log=gettext_lazy("Accepted."),
        done=gettext_lazy("handled again soon"),
        does="accept",
    ),
)

OUTBOX: Final = (
    MessageAction(
        name="retry",
        title=gettext_lazy("Retry dead letters"),
        button=gettext_lazy("Retry"),
        effects=(
            gettext_lazy("The message is sent with the same id. Its earlier attempts still count."),
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
        title=gettext_lazy("Discard dead letters"),
        button=gettext_lazy("Discard"),
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
        title=gettext_lazy("Send again with new ids"),
        button=gettext_lazy("Send again"),
        effects=(
            gettext_lazy("A copy is sent with a new id, so consumers handle it again."),
            gettext_lazy("In its group, the copy comes after messages that were published since."),
        ),
        log=gettext_lazy("Sent again with a new id."),
        done=gettext_lazy("sent again soon"),
        does="repeat",
    ),
)


class MessagingAdmin(ListAdmin):
    """Lists the rows of a table of messaging, from the database that they are written to."""

    def stored(self) -> QuerySet[Any]:
        rows: QuerySet[Any] = self.model._base_manager.using(database())
        return rows


class MessageAdmin(MessagingAdmin):
    """Lists and shows messages, and settles them.

    Attributes:
        place: the column that says where a message belongs.
        since: the column that says when it came.
        identity: what its page shows of what it is.
        content: the column with its content.
        secret_fields: further columns that only those may see who may see the content.
    """

    place: ClassVar[str]
    since: ClassVar[str]
    identity: ClassVar[Sequence[str]]
    content: ClassVar[str]
    secret_fields: ClassVar[Sequence[str]] = ("error",)

    def stored(self) -> QuerySet[Any]:
        # PostgreSQL's index of what waits has no others.
        rows: QuerySet[Any] = super().stored().filter(**{f"{self.place}__gt": ""})
        return rows

    def get_list_display(self, request: HttpRequest) -> Any:
        return ("message_id", "state", "type", self.place, "group", "attempts", self.since)

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        sections: list[Any] = [
            (None, {"fields": self.identity}),
            (_("State"), {"fields": ["state", "attempts"]}),
        ]
        if self.has_secret_permission(request):
            sections.append((_("Content"), {"fields": [*self.secret_fields, "content_shown"]}))
        return sections

    @admin.display(description=gettext_lazy("content"))
    def content_shown(self, message: Any) -> SafeString:
        content = getattr(message, self.content)
        if not isinstance(content, str):
            content = bytes(content).decode(errors="backslashreplace")
        return preformatted(content)


class SourceFilter(admin.SimpleListFilter):
    """By source: the receivers', and those of consumers that have dead letters."""

    title = gettext_lazy("source")
    parameter_name = "source"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(source, source) for source in known_sources()]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset.filter(source=self.value()) if self.value() else queryset


@admin.register(InboxMessage)
class InboxMessageAdmin(MessageAdmin):
    """Lists and shows what was received, and the dead letters of consumers."""

    operations = (*INBOX, _alike(INBOX[0], RETRY_ALIKE), _alike(INBOX[1], DISCARD_ALIKE))
    settle_permission = "idempotency_messaging.settle_message"
    secret = ("headers", "body", "error")
    hidden = ("digest", "unique_digest", "caused_by")
    view_permission = "idempotency_messaging.view_body"
    place = "source"
    since = "received_at"
    identity = ("message_id", "source", "type", "group")
    content = "body"
    secret_fields = ("error", "headers")
    list_filter = ("state", SourceFilter)
    search_fields = ("message_id",)
    search_help_text = gettext_lazy("Finds messages whose id begins with this text.")
    ordering = ("-received_at",)

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

    operations = (*OUTBOX, _alike(OUTBOX[0], RETRY_ALIKE), _alike(OUTBOX[1], DISCARD_ALIKE))
    settle_permission = "idempotency_messaging.settle_outbox"
    secret = ("payload", "error")
    # What caused it is in the timeline, for those who may see that.
    hidden = ("token", "dedup", "caused_by")
    view_permission = "idempotency_messaging.view_outbox_payload"
    place = "topic"
    since = "created_at"
    identity = ("message_id", "topic", "type", "group", "sequence")
    content = "payload"
    list_filter = ("state", "topic")
    search_fields = ("message_id__exact", "group__exact", "caused_by__exact")
    ordering = ("-pk",)


@admin.register(Heartbeat)
class HeartbeatAdmin(MessagingAdmin):
    """Lists the processes that run, or were killed. One that is not needed any more is deleted."""

    list_display = ("name", "process", "started_at", "beat_at", "hanging")
    fields = readonly_fields = list_display
    ordering = ("name", "beat_at")

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return admin.ModelAdmin.has_delete_permission(self, request, obj)
