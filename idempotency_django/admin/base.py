"""The lists of the admin, of keys and messages alike, and what an operator does to their rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Final

from django import forms
from django.contrib import admin, messages
from django.contrib.admin import helpers
from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.contrib.admin.utils import label_for_field, lookup_field, model_ngettext
from django.core.exceptions import PermissionDenied
from django.core.paginator import Paginator
from django.db import transaction
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..models import DatabaseNow, unlocked
from .timeline import TimelineMixin

COUNTED: Final = 10_000
"""The most rows that a list counts and shows; filters find older rows."""

MOST: Final = 300
"""The most rows that one action takes. Each is in the page's address, and servers such as gunicorn
refuse one that is longer than 4,094 characters.
"""

_NAMED: Final = 3  # rows that a message names
_IN_USE: Final = gettext_lazy("It is in use now, or was deleted. Try again later.")


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

    It has a page, for one row or several. The page of a row has a button that leads there; if it is
    ``for_many``, the list offers it, too. It asks first, locks the rows, skips rows in use, and is
    logged.

    Attributes:
        name: of its page; the list calls it ``<name>_selected``.
        title: what is going to be done.
        button: what leads to its page from a row's.
        permission: who may do it: the list's method ``has_<permission>_permission`` says.
        for_many: whether rows can be selected for it in the list.
        flag: the kind of log entry.
        form: what the operator enters for it.
        effects: what happens then to the rows, for the operator who is asked.
        log: the log entry of each row; what was entered is formatted into it.
        done: what was done, after the number of rows.
    """

    name: str
    title: Any
    button: Any
    permission: str = "settle"
    for_many: bool = True
    flag: int = CHANGE
    form: type[forms.Form] = forms.Form
    effects: Sequence[Any] = ()
    log: Any
    done: Any

    # What Django's admin asks of an action.

    @property
    def __name__(self) -> str:
        return f"{self.name}_selected"

    @property
    def short_description(self) -> Any:
        """What the list offers."""
        return self.title

    @property
    def allowed_permissions(self) -> Sequence[str]:
        """Who is offered it."""
        return (self.permission,)

    def __call__(self, page: Any, request: HttpRequest, rows: QuerySet[Any]) -> Any:
        pks = list(rows.order_by().values_list("pk", flat=True)[: MOST + 1])
        if len(pks) <= MOST:
            return HttpResponseRedirect(page.address(self.name, *pks))
        text = _("Select at most %(most)d %(rows)s for this action.")
        values = {"most": MOST, "rows": page.opts.verbose_name_plural}
        page.message_user(request, text % values, messages.ERROR)
        return None

    # What an action is.

    def offers(self, row: Any) -> bool:
        """Whether the row's page has the button."""
        return not self.refusal(row, {})

    def initial(self, row: Any) -> dict[str, Any]:
        """The values that the form begins with."""
        return {}

    def refusal(self, row: Any, given: Mapping[str, Any]) -> str:
        """The reason why it cannot be done to the row, given what was entered; empty if it can."""
        raise NotImplementedError

    def consequences(self, rows: Sequence[Any]) -> Iterable[Any]:
        """The effects on these rows in particular."""
        return self.effects

    def apply(self, rows: Sequence[Any], given: Mapping[str, Any], by: str) -> Mapping[Any, str]:
        """Do it to these rows, which are locked.

        Args:
            rows: at least one.
            given: what the operator has entered.
            by: the operator's name.

        Returns:
            Why it was not done to some of the rows, by their primary keys.
        """
        raise NotImplementedError


class ListAdmin(TimelineMixin):
    """Lists rows that only the package writes, and has an operator's actions on them.

    Opening the list costs the same however many rows there are: nothing counts, sorts or searches
    without an index.

    Attributes:
        operations: what an operator can do.
        settle_permission: who may do it, besides viewing.
        secret: columns that the list does not read, and does not filter by.
        hidden: further columns that the list does not filter by.
        view_permission: who may see the secret columns on the page of one row.
    """

    operations: ClassVar[Sequence[Action]] = ()
    settle_permission: ClassVar[str]
    secret: ClassVar[Sequence[str]] = ()
    hidden: ClassVar[Sequence[str]] = ()
    view_permission: ClassVar[str]

    list_per_page = 50
    paginator = BoundedPaginator
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    sortable_by: ClassVar[Any] = ()

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.actions = [action for action in self.operations if action.for_many]

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

    def _may(self, action: Action, request: HttpRequest) -> bool:
        return bool(getattr(self, f"has_{action.permission}_permission")(request))

    # What is read and shown.

    def stored(self) -> QuerySet[Any]:
        """All rows, from where they are written."""
        raise NotImplementedError

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        rows: QuerySet[Any] = self.stored().annotate(now=DatabaseNow()).defer(*self.secret)
        return rows.order_by(*(self.ordering or ("pk",)))

    def render_change_form(
        self, request: HttpRequest, context: Any, *args: Any, **options: Any
    ) -> HttpResponse:
        row = options["obj"]
        offered = (a for a in self.operations if self._may(a, request) and a.offers(row))
        context["subtitle"] = None  # the page shows it
        context["buttons"] = [(a.button, self.address(a.name, row.pk)) for a in offered]
        return super().render_change_form(request, context, *args, **options)

    # What an operator does.

    def address(self, page: str, *pks: Any) -> str:
        """The address of a page of one or several rows; of the list if there are none."""
        name = f"admin:{self.opts.app_label}_{self.opts.model_name}_{page}"
        args = [",".join(map(str, pks))] if pks else []
        return reverse(name, args=args, current_app=self.admin_site.name)

    def get_urls(self) -> list[URLPattern]:
        name = f"{self.opts.app_label}_{self.opts.model_name}"
        view = self.admin_site.admin_view(self.action_view)
        pages = [
            path(f"<path:pks>/{each.name}/", view, {"action": each}, name=f"{name}_{each.name}")
            for each in self.operations
        ]
        return [*pages, *super().get_urls()]

    def action_view(self, request: HttpRequest, pks: str, action: Action) -> HttpResponse:
        """Do something to rows, after asking."""
        if not self._may(action, request):
            raise PermissionDenied
        rows = self.get_queryset(request)
        try:
            rows = rows.filter(pk__in=pks.split(",") if action.for_many else [pks])
        except ValueError:
            raise Http404 from None
        chosen = list(rows)
        if not chosen:
            raise Http404
        data = request.POST if request.method == "POST" else None
        form = action.form(data, initial=action.initial(chosen[0]))
        if not form.is_valid():
            return self._question(request, action, form, chosen)
        self._perform(request, action, form, chosen, rows)
        alone = len(chosen) == 1 and action.flag != DELETION
        page = self.address("change", pks) if alone else self.address("changelist")
        return HttpResponseRedirect(page)

    def _perform(
        self,
        request: HttpRequest,
        action: Action,
        form: forms.Form,
        chosen: Sequence[Any],
        rows: QuerySet[Any],
    ) -> None:
        """Do it to the chosen rows, log it in the same transaction, and say what came of it."""
        user: Any = request.user
        given = form.cleaned_data
        refusals = dict.fromkeys((row.pk for row in chosen), str(_IN_USE))
        with transaction.atomic(using=rows.db):
            locked = unlocked(rows.order_by("pk"))
            refusals |= {row.pk: action.refusal(row, given) for row in locked}
            possible = [row for row in locked if not refusals[row.pk]]
            if possible:
                refusals |= action.apply(possible, given, user.get_username())
            done = [row for row in possible if not refusals[row.pk]]
            LogEntry.objects.log_actions(user.pk, done, action.flag, str(action.log) % given)
        if done:
            counted = f"{len(done)} {model_ngettext(self.opts, len(done))}"
            self.message_user(request, f"{counted}: {action.done}.", messages.SUCCESS)
        for line in _left_unchanged(chosen, refusals):
            self.message_user(request, line, messages.WARNING)

    def _question(
        self, request: HttpRequest, action: Action, form: forms.Form, rows: Sequence[Any]
    ) -> HttpResponse:
        """The confirmation page with the consequences."""
        given = form.cleaned_data if form.is_bound else {}
        refusals = {row.pk: action.refusal(row, given) for row in rows}
        chosen = [row for row in rows if not refusals[row.pk]]
        columns = self.get_list_display(request)
        layout: Any = helpers.AdminForm  # whose types ask for the form of a model
        fields = [field.name for field in form.visible_fields()]
        context = {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "media": self.media,
            "title": action.title,
            "original": rows[0] if len(rows) == 1 else None,
            "heads": [label_for_field(column, self.model, self) for column in columns],
            "rows": [[lookup_field(column, row, self)[2] for column in columns] for row in rows],
            "left_unchanged": _left_unchanged(rows, refusals),
            "consequences": action.consequences(chosen) if chosen else (),
            "form": form,
            "fieldset": next(
                iter(layout(form, [(None, {"fields": fields})], {}, (), model_admin=self))
            ),
        }
        return TemplateResponse(request, "admin/idempotency_django/action.html", context)


def _left_unchanged(rows: Sequence[Any], refusals: Mapping[Any, str]) -> Iterator[str]:
    """One line for each reason why rows are left unchanged."""
    for refusal in dict.fromkeys(filter(None, refusals.values())):
        names = [str(row) for row in rows if refusals[row.pk] == refusal]
        more = ", …" if len(names) > _NAMED else ""
        yield _("Left unchanged: %(rows)s. %(reason)s") % {
            "rows": ", ".join(names[:_NAMED]) + more,
            "reason": refusal,
        }
