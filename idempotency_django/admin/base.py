"""The lists of the admin, of keys and messages alike, and what an operator does to their rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Final

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.utils import model_ngettext
from django.core.paginator import Paginator
from django.db import transaction
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.text import Truncator
from django.utils.translation import gettext as _

from ..models import DatabaseNow
from .timeline import context_of

COUNTED: Final = 10_000
"""The most rows that a list counts and shows; filters find older rows."""

LONGEST_TEXT: Final = 100_000
"""The most characters of a text that are shown."""

_CONFIRMED: Final = "confirmed"


def preformatted(text: str) -> SafeString:
    """A text of a client as it is, never taken for HTML, up to the limit; a dash for none."""
    if not text:
        return SafeString("–")
    shown = Truncator(text).chars(LONGEST_TEXT)
    return format_html('<pre class="idempotency-content" tabindex="0">{}</pre>', shown)


class BoundedPaginator(Paginator):  # type: ignore[type-arg]  # not subscriptable at runtime
    """Counts up to ``COUNTED`` and no further."""

    @cached_property
    def counted(self) -> int:
        """The number of rows; more than ``COUNTED`` when there are more."""
        rows: Any = self.object_list
        return int(rows.order_by().values("pk")[: COUNTED + 1].count())

    @cached_property
    def count(self) -> int:
        return min(self.counted, COUNTED)

    @property
    def has_more(self) -> bool:
        """Whether there are rows that no page leads to."""
        return self.counted > COUNTED


class Action:
    """One of the things that an operator can do to rows; an action of Django's admin.

    It is done to the rows that are selected in the list, or to the row whose page has its button.
    It asks first, and is logged for each row that it was done to.

    Attributes:
        name: of the action.
        short_description: what is done, in the list and on its page.
        allowed_permissions: who may do it: the list's methods ``has_<permission>_permission`` say.
        form: what the operator enters for it.
        effects: what happens then to the rows, for the operator who is asked.
        log: the log entry of each row; what was entered is formatted into it.
        done: what was done, after the number of rows.
    """

    name: str
    short_description: Any
    allowed_permissions: Sequence[str] = ("settle",)
    form: type[forms.Form] = forms.Form
    effects: Sequence[Any] = ()
    log: Any
    done: Any
    do_not_call_in_templates = True

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, page: Any, request: HttpRequest, rows: QuerySet[Any]) -> Any:
        form = self.form(request.POST if _CONFIRMED in request.POST else None)
        if not form.is_valid():
            return self._question(page, request, form, rows)
        self._perform(page, request, form.cleaned_data, rows)
        return None

    def fits(self, row: Any) -> bool:
        """Whether it can be done to a row as it is."""
        raise NotImplementedError

    def apply(
        self, rows: QuerySet[Any], given: Mapping[str, Any], by: str
    ) -> Iterable[tuple[Any, str]]:
        """Do it to the rows, but to none that is in use.

        Args:
            rows: the rows.
            given: what the operator has entered.
            by: the operator's name.

        Returns:
            Each row, and why it was not done to it; empty: it was.
        """
        raise NotImplementedError

    def _perform(
        self, page: Any, request: HttpRequest, given: Mapping[str, Any], rows: QuerySet[Any]
    ) -> None:
        """Do it to the rows, log it in the same transaction, and say what came of it."""
        user: Any = request.user
        done, refusals = [], Counter[str]()
        with transaction.atomic(using=rows.db):
            for row, refusal in self.apply(rows, given, user.get_username()):
                if refusal:
                    refusals[refusal] += 1
                else:
                    done.append(row)
            LogEntry.objects.log_actions(user.pk, done, CHANGE, str(self.log) % given)
        if done:
            counted = _counted(page, len(done))
            page.message_user(request, f"{counted}: {self.done}.", messages.SUCCESS)
        for refusal, number in refusals.items():
            text = _("Left unchanged: %(number)d. %(reason)s")
            values = {"number": number, "reason": refusal}
            page.message_user(request, text % values, messages.WARNING)

    def _question(
        self, page: Any, request: HttpRequest, form: forms.Form, rows: QuerySet[Any]
    ) -> HttpResponse:
        """The page that says what happens then, and asks."""
        selected = request.POST.getlist(ACTION_CHECKBOX_NAME)
        across = request.POST.get("select_across") == "1"
        context = {
            **page.admin_site.each_context(request),
            "opts": page.opts,
            "media": page.media,
            "title": self.short_description,
            "action": self,
            "form": form,
            "rows": () if across else rows[: len(selected)],
            "chosen": _counted(page, rows.count()),
            "selected": selected,
            "select_across": int(across),
            "checkbox_name": ACTION_CHECKBOX_NAME,
            "confirmed_name": _CONFIRMED,
        }
        return TemplateResponse(request, "admin/idempotency_django/action.html", context)


def _counted(page: Any, number: int) -> str:
    """The number of rows, in words."""
    return f"{number} {model_ngettext(page.opts, number)}"


class ListAdmin(admin.ModelAdmin):  # type: ignore[type-arg]  # not subscriptable at runtime
    """Lists rows that only the package writes, and has an operator's actions on them.

    Opening the list costs the same however many rows there are: nothing counts, sorts or searches
    without an index.

    Attributes:
        settle_permission: who may do the actions, besides viewing.
        secret: columns that the list does not read, and does not filter by.
        hidden: further columns that the list does not filter by.
        view_permission: who may see the secret columns on the page of one row.
    """

    settle_permission: ClassVar[str] = ""
    secret: ClassVar[Sequence[str]] = ()
    hidden: ClassVar[Sequence[str]] = ()
    view_permission: ClassVar[str]

    list_per_page = 50
    paginator = BoundedPaginator
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    sortable_by: ClassVar[Any] = ()
    change_form_template = "admin/idempotency_django/change_form.html"

    class Media:
        css: ClassVar[dict[str, list[str]]] = {"all": ["idempotency_django/admin.css"]}

    # What may be done.

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_settle_permission(self, request: HttpRequest) -> bool:
        """Whether the user may do what an operator does."""
        return request.user.has_perm(self.settle_permission) and self.has_view_permission(request)

    def has_secret_permission(self, request: HttpRequest) -> bool:
        """Whether the user may see the secret columns."""
        return request.user.has_perm(self.view_permission)

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest) -> bool:
        # A user who can filter by a column can find out its values.
        if lookup.partition("__")[0] in {*self.secret, *self.hidden}:
            return False
        return super().lookup_allowed(lookup, value, request)

    # What is read and shown.

    def stored(self) -> QuerySet[Any]:
        """All rows, from where they are written."""
        raise NotImplementedError

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        rows: QuerySet[Any] = self.stored().annotate(now=DatabaseNow()).defer(*self.secret)
        return rows.order_by(*(self.ordering or ("pk",)))

    def results_of(self, request: HttpRequest, row: Any) -> str:
        """The reference of the record whose results of steps are shown; empty: of none."""
        return ""

    def render_change_form(
        self, request: HttpRequest, context: Any, *args: Any, **options: Any
    ) -> HttpResponse:
        row = options["obj"]
        if self.has_settle_permission(request):
            actions: Any = self.actions or ()
            context["offered"] = [action for action in actions if action.fits(row)]
        context["checkbox_name"] = ACTION_CHECKBOX_NAME
        context |= context_of(self.admin_site, request, row, self.results_of(request, row))
        return super().render_change_form(request, context, *args, **options)
