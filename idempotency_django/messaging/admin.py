"""The tables of messaging in the admin."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Final

from django import forms
from django.contrib import admin, messages
from django.contrib.admin import helpers
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import PermissionDenied
from django.core.paginator import Paginator
from django.db import transaction
from django.db.models import Exists, OuterRef, Q, QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ..admin.text import cut, indented
from ..admin.timeline import TimelineMixin
from ..models import DatabaseNow
from ..timeline import Moment
from . import settling
from . import streams as positions
from .databases import database
from .inbox.receivers import CONSUMER, known_sources
from .models import InboxMessage, MessageState, OutboxMessage, OutboxStream, StreamPosition
from .settling import NotSettled

COUNTED: Final = 10_000
"""Messages that a list counts and leads to; to find an older one, narrow the list down."""


class BoundedPaginator(Paginator):  # type: ignore[type-arg]  # not subscriptable at runtime
    """Counts up to ``COUNTED`` and no further."""

    @cached_property
    def count(self) -> int:
        rows: Any = self.object_list
        counted: int = rows.order_by().values("pk")[:COUNTED].count()
        return counted


class SourceFilter(admin.SimpleListFilter):
    """By source: the receivers', and those of consumers that have dead letters."""

    title = gettext_lazy("source")
    parameter_name = "source"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(source, source) for source in known_sources()]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset.filter(source=self.value()) if self.value() else queryset


@dataclass(frozen=True, slots=True)
class Settlement:
    """One way to settle a message.

    Attributes:
        name: of its page.
        title: what is going to be done.
        button: what leads to its page.
        fits: whether a message is in a state that it can be done in.
        consequences: what happens then, for the operator who is asked.
        logged: the log entry.
        done: what follows, said after it was done.
        settle: does it to a message, ``by`` an operator; raises ``NotSettled``.
        place: the column that says where a message belongs.
    """

    name: str
    title: Any
    button: Any
    fits: Callable[[Any], bool]
    consequences: Sequence[Any]
    logged: Any
    done: Any
    settle: Callable[..., None]
    place: str


INBOX: Final = (
    Settlement(
        "retry",
        gettext_lazy("Retry messages"),
        gettext_lazy("Retry"),
        settling.can_retry,
        (
            gettext_lazy("The message is handled again as soon as a process looks at the inbox."),
            gettext_lazy(
                "It is a further attempt at the same operation: steps that are stored are not done "
                "again, and keys that were derived for other services are the same."
            ),
            gettext_lazy("If it fails again, it is a dead letter again."),
        ),
        gettext_lazy("Retried."),
        gettext_lazy("handled again soon."),
        settling.retry,
        "source",
    ),
    Settlement(
        "discard",
        gettext_lazy("Discard dead letters"),
        gettext_lazy("Discard"),
        settling.can_discard,
        (
            gettext_lazy("The message is not handled, and its group goes on without it."),
            gettext_lazy("Until it is purged, it can be reprocessed."),
        ),
        gettext_lazy("Discarded; its group goes on without it."),
        gettext_lazy("discarded."),
        settling.discard,
        "source",
    ),
    Settlement(
        "reprocess",
        gettext_lazy("Reprocess messages"),
        gettext_lazy("Reprocess"),
        settling.can_repeat,
        (
            gettext_lazy(
                "The handler is called again, from the beginning, although it has succeeded before."
            ),
            gettext_lazy(
                "What it has written to the database stays, and is written a second time."
            ),
            gettext_lazy(
                "Keys that it derives for other services are the same, so that they recognise what "
                "they have done."
            ),
        ),
        gettext_lazy("Reprocessed."),
        gettext_lazy("handled again soon."),
        settling.repeat,
        "source",
    ),
    Settlement(
        "accept",
        gettext_lazy("Accept messages"),
        gettext_lazy("Accept"),
        settling.can_accept,
        (
            gettext_lazy(
                "Another body came under the same id before, or the same body under another id, "
                "which the signature does not cover: find out from the sender whether both are "
                "genuine."
            ),
            gettext_lazy("The message is handled like any other then."),
        ),
        gettext_lazy("Accepted."),
        gettext_lazy("handled again soon."),
        settling.accept,
        "source",
    ),
)


OUTBOX: Final = (
    Settlement(
        "retry",
        gettext_lazy("Retry dead letters"),
        gettext_lazy("Retry"),
        settling.can_retry,
        (
            gettext_lazy("The message is sent under its old id, with all its attempts before it."),
            gettext_lazy(
                "Its group goes on after it. If the broker refuses it again, it is a dead letter "
                "again."
            ),
        ),
        gettext_lazy("Retried; it is sent under its old id."),
        gettext_lazy("sent soon."),
        settling.retry,
        "topic",
    ),
    Settlement(
        "discard",
        gettext_lazy("Discard dead letters"),
        gettext_lazy("Discard"),
        settling.can_discard,
        (
            gettext_lazy("The message is never sent, and its group goes on without it."),
            gettext_lazy(
                "Until it is purged, it can be sent again, after what was sent meanwhile."
            ),
        ),
        gettext_lazy("Discarded; its group goes on without it."),
        gettext_lazy("discarded."),
        settling.discard,
        "topic",
    ),
    Settlement(
        "resend",
        gettext_lazy("Send again, under new ids"),
        gettext_lazy("Send again"),
        settling.can_repeat,
        (
            gettext_lazy("A copy is sent under a new id: consumers handle it once more."),
            gettext_lazy("In its group, it comes after what was published since."),
        ),
        gettext_lazy("Sent again, under a new id."),
        gettext_lazy("sent again soon."),
        settling.repeat,
        "topic",
    ),
)


class ReadOnly(admin.ModelAdmin):  # type: ignore[type-arg]  # not subscriptable at runtime
    """Rows that only the package writes."""

    list_per_page = 50
    paginator = BoundedPaginator
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    sortable_by = ()

    Media = TimelineMixin.Media

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        rows: QuerySet[Any] = self.model._base_manager.using(database())
        dated: QuerySet[Any] = rows.annotate(now=DatabaseNow())
        return dated.order_by(*(self.ordering or ("pk",)))


class MessageAdmin(TimelineMixin, ReadOnly):
    """Lists and shows messages, and settles them: one from its page, several from the list.

    Attributes:
        secret: columns that are fetched for those only who may see the content of messages.
        hidden: further columns that nobody may filter by.
        since: the column that says when a message came.
        settlements: what an operator can do.
        settle_permission: who may do it.
    """

    secret: ClassVar[Sequence[str]]
    hidden: ClassVar[Sequence[str]] = ()
    since: ClassVar[str]
    settlements: ClassVar[Sequence[Settlement]]
    settle_permission: ClassVar[str]
    list_display = ("short_id", "state_shown", "type_and_place", "attempts", "came")
    change_form_template = "admin/idempotency_django/change_form.html"

    # What may be done.

    def has_settle_permission(self, request: HttpRequest) -> bool:
        """Whether the user may settle messages."""
        return request.user.has_perm(self.settle_permission) and self.has_view_permission(request)

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest) -> bool:
        # Somebody who may filter by a column can find out what is in it.
        if lookup.partition("__")[0] in (*self.secret, *self.hidden):
            return False
        return super().lookup_allowed(lookup, value, request)

    # What is shown.

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).defer(*self.secret)

    @admin.display(description=gettext_lazy("message id"))
    def short_id(self, message: Any) -> SafeString:
        return cut(message.message_id, 40)

    @admin.display(description=gettext_lazy("type, and where from or to"))
    def type_and_place(self, message: Any) -> SafeString:
        place = getattr(message, self.settlements[0].place)
        where = f"{place}, {message.group}" if message.group else place
        return format_html(
            '<div>{}</div><div class="quiet">{}</div>', cut(message.type, 60), cut(where, 60)
        )

    @admin.display(description=gettext_lazy("state"))
    def state_shown(self, message: Any) -> SafeString:
        css = "idempotency-held" if message.state == MessageState.DEAD else ""
        return format_html('<span class="{}">{}</span>', css, message.get_state_display())

    @admin.display(description=gettext_lazy("came"))
    def came(self, message: Any) -> SafeString:
        return Moment(getattr(message, self.since), message.now).html

    def render_change_form(
        self, request: HttpRequest, context: Any, *args: Any, **options: Any
    ) -> HttpResponse:
        message = options["obj"]
        may_settle = self.has_settle_permission(request)
        context |= {
            "subtitle": None,
            "buttons": [kind for kind in self.settlements if may_settle and kind.fits(message)],
        }
        return super().render_change_form(request, context, *args, **options)

    # What an operator does.

    def get_actions(self, request: HttpRequest) -> Any:
        return super().get_actions(request) | {
            f"{kind.name}_selected": (_settle_selected(kind), f"{kind.name}_selected", kind.title)
            for kind in self.settlements
            if self.has_settle_permission(request)
        }

    def get_urls(self) -> list[URLPattern]:
        pages = [
            path(
                f"<path:object_id>/{kind.name}/",
                self.admin_site.admin_view(self.settle_view),
                {"kind": kind},
                name=f"{self.opts.app_label}_{self.opts.model_name}_{kind.name}",
            )
            for kind in self.settlements
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
        page = f"admin:{self.opts.app_label}_{self.opts.model_name}_change"
        site = self.admin_site.name
        return HttpResponseRedirect(reverse(page, args=[quote(message.pk)], current_app=site))

    def settle(self, request: HttpRequest, kind: Settlement, chosen: Sequence[Any]) -> None:
        """Settle the messages, each in a transaction of its own, and say what came of it."""
        done: list[Any] = []
        for message in sorted(chosen, key=lambda message: message.pk):  # in the order of groups
            try:
                kind.settle(message, by=request.user.get_username())
            except NotSettled as error:
                messages.warning(request, f"{message}: {error}")
            else:
                done.append(message)
        if done:
            user: Any = request.user
            LogEntry.objects.log_actions(user.pk, done, CHANGE, str(kind.logged))
            said = ngettext(
                "%(count)d message: %(what)s", "%(count)d messages: %(what)s", len(done)
            )
            messages.success(request, said % {"count": len(done), "what": kind.done})

    def question(
        self,
        request: HttpRequest,
        kind: Settlement,
        chosen: Sequence[Any],
        original: Any = None,
    ) -> HttpResponse:
        """The page that says what follows, and asks."""
        column: Any = self.opts.get_field(kind.place)
        context = {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "media": self.media,
            "title": kind.title,
            "kind": kind,
            "original": original,
            "place": column.verbose_name,
            "chosen": [(each, getattr(each, kind.place)) for each in chosen if kind.fits(each)],
            "left_alone": [message for message in chosen if not kind.fits(message)],
            "action_checkbox_name": helpers.ACTION_CHECKBOX_NAME,
        }
        template = "admin/idempotency_messaging/message/action.html"
        return TemplateResponse(request, template, context)


def _settle_selected(kind: Settlement) -> Callable[..., HttpResponse | None]:
    """The settlement as the list of messages offers it."""

    def action(page: Any, request: HttpRequest, rows: QuerySet[Any]) -> HttpResponse | None:
        chosen = list(rows)
        if "post" not in request.POST:
            return page.question(request, kind, chosen)  # type: ignore[no-any-return]
        page.settle(request, kind, chosen)
        return None

    return action


def preformatted(text: str) -> SafeString:
    """A text as it is."""
    return format_html('<pre class="idempotency-content" tabindex="0">{}</pre>', text)


@admin.register(InboxMessage)
class InboxMessageAdmin(MessageAdmin):
    """Lists and shows what was received, and the dead letters of consumers."""

    secret = ("headers", "body", "error")
    hidden = ("digest", "unique_digest")
    since = "received_at"
    settlements = INBOX
    list_display = ("short_id", "state_shown", "type_and_place", "attempts_shown", "came")
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
            (_("State"), {"fields": ["state_shown", "attempts_shown"]}),
            *([(_("Content"), {"fields": shown})] if may_see else []),
        ]

    @admin.display(description=gettext_lazy("attempts"))
    def attempts_shown(self, message: InboxMessage) -> str:
        """Those of the inbox; the attempts before a consumer dead-lettered it are in its record."""
        nowhere = not message.attempts and message.source.startswith(CONSUMER)
        return "–" if nowhere else str(message.attempts)

    @admin.display(description=gettext_lazy("error"))
    def error_shown(self, message: InboxMessage) -> str:
        return preformatted(message.error) if message.error else "–"

    @admin.display(description=gettext_lazy("headers"))
    def headers_shown(self, message: InboxMessage) -> SafeString:
        return preformatted("\n".join(f"{k}: {v}" for k, v in json.loads(message.headers)))

    @admin.display(description=gettext_lazy("body"))
    def body_shown(self, message: InboxMessage) -> SafeString:
        return preformatted(indented(bytes(message.body).decode(errors="backslashreplace")))


@admin.register(OutboxMessage)
class OutboxMessageAdmin(MessageAdmin):
    """Lists and shows messages, retries and discards dead letters, and sends again."""

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
        dead = OutboxMessage.objects.filter(stream=OuterRef("stream"), state=MessageState.DEAD)
        rows: QuerySet[Any] = super().get_queryset(request)
        annotated: QuerySet[Any] = rows.annotate(has_dead=Exists(dead))
        return annotated

    @admin.display(description=gettext_lazy("not sent yet"))
    def waiting(self, stream: OutboxStream) -> int:
        """How many of its messages are not sent."""
        unsent = Q(state__in=[MessageState.PENDING, MessageState.DEAD])
        rows = OutboxMessage.objects.using(database()).filter(unsent, stream=stream.stream)
        return rows.count()

    @admin.display(description=gettext_lazy("state"))
    def state(self, stream: Any) -> SafeString:
        """Whether it waits for an operator."""
        if stream.has_dead:
            return format_html('<span class="idempotency-held">{}</span>', _("dead"))
        return format_html("{}", _("free"))


TEMPLATE = "admin/idempotency_messaging/streamposition/reset.html"


class ResetForm(forms.Form):
    """The new position of a stream, and why.

    Attributes:
        row: the stream as the operator sees it.
    """

    position = forms.IntegerField(
        label=gettext_lazy("Position"),
        min_value=-1,
        max_value=positions.LARGEST,
        help_text=gettext_lazy("The last offset that counts as processed; -1: none."),
    )
    reason = forms.CharField(label=gettext_lazy("Reason"), max_length=200)
    # The row as the operator has seen it: another one must not be changed by an old page.
    seen = forms.CharField(widget=forms.HiddenInput)

    def __init__(self, row: StreamPosition, data: Any = None) -> None:
        initial = {"position": row.position, "seen": _seen(row)}
        super().__init__(data, initial=initial)
        self.row = row

    def clean(self) -> None:
        if self.cleaned_data.get("seen") != _seen(self.row):
            raise forms.ValidationError(
                _("The stream has moved since you opened this page. Open it again, and look.")
            )

    def apply(self) -> None:
        """Set the position. The owner of a stream is fenced; a peer's epoch is its own."""
        row, values = self.row, {"position": self.cleaned_data["position"]}
        if not row.stream.startswith(positions.PEER):
            values["epoch"] = row.epoch + 1
        positions.change(database(), row.stream, **values)


def _seen(row: StreamPosition) -> str:
    return f"{row.epoch}:{row.position}"


@admin.register(StreamPosition)
class StreamPositionAdmin(ReadOnly):
    """Lists and shows the streams and peers; who may can reset a position, and nobody can edit."""

    list_display = ("stream", "epoch", "position", "updated")
    fields = readonly_fields = list_display
    search_fields = ("stream__startswith",)
    search_help_text = gettext_lazy("Finds streams whose names begin with this text.")
    ordering = ("stream",)
    actions = None

    def has_reset_permission(self, request: HttpRequest) -> bool:
        """Whether the user may set positions by hand."""
        may_reset = request.user.has_perm("idempotency_messaging.reset_streamposition")
        return may_reset and self.has_view_permission(request)

    @admin.display(description=gettext_lazy("updated"))
    def updated(self, row: Any) -> SafeString:
        return Moment(row.updated_at, row.now).html

    def get_urls(self) -> list[URLPattern]:
        view = self.admin_site.admin_view(self.reset_view)
        name = "idempotency_messaging_streamposition_reset"
        return [path("<path:object_id>/reset/", view, name=name), *super().get_urls()]

    def render_change_form(
        self, request: HttpRequest, context: Any, *args: Any, **options: Any
    ) -> HttpResponse:
        context |= {"may_reset": self.has_reset_permission(request)}
        return super().render_change_form(request, context, *args, **options)

    def reset_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Ask for the new position of a stream, and set it."""
        if not self.has_reset_permission(request):
            raise PermissionDenied
        with transaction.atomic(using=database()):
            rows = self.get_queryset(request).filter(pk=_number(object_id))
            row = (rows.select_for_update() if request.method == "POST" else rows).first()
            if row is None:
                raise Http404
            form = ResetForm(row, request.POST if request.method == "POST" else None)
            if form.is_valid():
                form.apply()
                self._log(request, form)
                page = "admin:idempotency_messaging_streamposition_change"
                site = self.admin_site.name
                return HttpResponseRedirect(reverse(page, args=[row.pk], current_app=site))
        return self._question(request, form)

    def _log(self, request: HttpRequest, form: ResetForm) -> None:
        """Say who has done it, and why."""
        values = {**form.cleaned_data, "before": form.row.position}
        text = _("Reset from %(before)d to %(position)d: %(reason)s") % values
        user: Any = request.user
        LogEntry.objects.log_actions(user.pk, [form.row], CHANGE, text)
        done = _("The position of the stream was reset. Its owner must claim it again.")
        self.message_user(request, done, messages.SUCCESS)

    def _question(self, request: HttpRequest, form: ResetForm) -> HttpResponse:
        layout: Any = helpers.AdminForm  # whose types ask for the form of a model
        fieldsets = [(None, {"fields": ["position", "reason"]})]
        context = {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "media": self.media,
            "title": _("Reset the position"),
            "original": form.row,
            "is_peer": form.row.stream.startswith(positions.PEER),
            "form": form,
            "fieldset": next(iter(layout(form, fieldsets, {}, (), model_admin=self))),
        }
        return TemplateResponse(request, TEMPLATE, context)


def _number(object_id: str) -> int:
    """The primary key that the admin has quoted."""
    try:
        return int(unquote(object_id))
    except ValueError:
        raise Http404 from None
