"""What the lists and pages of messages share, of the inbox and of the outbox."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from django.contrib import admin, messages
from django.contrib.admin import helpers
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy, ngettext

from ...models import DatabaseNow
from ...tracing.admin import TimelineMixin
from ...tracing.legible import cut
from ...tracing.moments import Moment
from ..databases import database
from ..inbox.settling import NotSettled
from .changelist import BoundedPaginator
from .settlements import Settlement

OPERATOR = frozenset({"parked", "held", "blocked"})
"""The states that wait for an operator."""


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
    change_form_template = "admin/idempotency_messaging/message/change_form.html"

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
        css = "idempotency-held" if message.state in OPERATOR else ""
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
                kind.settle(message.pk, by=request.user.get_username())
            except (NotSettled, ImproperlyConfigured) as error:
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
