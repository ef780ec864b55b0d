"""The timeline on the admin's page of any member of a chain of causes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar, Final

from django.contrib.admin import AdminSite, ModelAdmin
from django.contrib.admin.utils import quote
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from ..timeline import (
    DEEPEST,
    MISSING,
    MOST,
    Confidential,
    Entry,
    Member,
    Timeline,
    member_of,
    trace,
)
from .text import indented

VIEW_RECORDS: Final = "idempotency_django.view_idempotencykey"


class TimelineMixin(ModelAdmin):  # type: ignore[type-arg]  # not subscriptable at runtime
    """Shows the timeline of the chain of causes on the page of a row that a source knows.

    A user sees of each row of the chain only that it is there, unless the row's own page would be
    shown to them. Of answers, a timeline shows what :meth:`confidential` allows.
    """

    change_form_template = "admin/idempotency_django/change_form.html"

    class Media:
        css: ClassVar[dict[str, list[str]]] = {"all": ["idempotency_django/admin.css"]}

    def confidential(self, request: HttpRequest, row: Any) -> Confidential:
        """What of the timeline is shown to the user besides what everybody sees."""
        return Confidential(derived=request.user.has_perm("idempotency_django.view_answer"))

    def render_change_form(
        self, request: HttpRequest, context: Any, *args: Any, **options: Any
    ) -> HttpResponse:
        row = options.get("obj")
        member = member_of(row) if row is not None else None
        if member is not None:
            timeline = trace(member, self.confidential(request, row))
            context["chain"] = Chain(timeline, Links(self.admin_site, request, timeline))
        return super().render_change_form(request, context, *args, **options)


class Links:
    """The pages of a timeline's members, as far as the user may see them.

    Args:
        site: the admin.
        request: the user's.
        timeline: the timeline.
    """

    def __init__(self, site: AdminSite, request: HttpRequest, timeline: Timeline) -> None:
        self._site = site
        self._request = request
        self._addresses: dict[Member, str] = {}
        by_table: dict[Any, list[Member]] = {}
        for _depth, member in timeline.members:
            if member.row is not None:
                by_table.setdefault((type(member.row), member.where), []).append(member)
            elif member.kind != MISSING and request.user.has_perm(VIEW_RECORDS):
                self._addresses[member] = ""  # it has no page
        for (model, where), members in by_table.items():
            self._look_at(model, where, members)

    def __getitem__(self, member: Member) -> str | None:
        """The address of its page, empty if it has none; ``None``: the user may not see it."""
        return self._addresses.get(member)

    def _look_at(self, model: Any, where: str, members: list[Member]) -> None:
        page = self._site._registry.get(model)
        if page is None or not page.has_view_permission(self._request):
            return
        rows = page.get_queryset(self._request)
        here = rows.using(where).filter(pk__in=[member.row.pk for member in members])
        allowed = set(here.values_list("pk", flat=True))
        name = f"admin:{model._meta.app_label}_{model._meta.model_name}_change"
        for member in members:
            if member.row.pk in allowed:
                pk = quote(member.row.pk)
                address = reverse(name, args=[pk], current_app=self._site.name)
                # The page of another database's row would be that of another row.
                self._addresses[member] = address if where == rows.db else ""


class Chain:
    """A timeline as the template shows it.

    Attributes:
        more: whether members were left out.
        unreachable: what could not be asked.
        most: how many members a timeline holds.
        deepest: how many causes or effects one after the other.
        shown: how many members this one holds.
    """

    most = MOST
    deepest = DEEPEST

    def __init__(self, timeline: Timeline, links: Links) -> None:
        self._timeline = timeline
        self._links = links
        self.shown = len(timeline.members)
        self.more = timeline.more
        self.unreachable = timeline.unreachable

    @property
    def entries(self) -> Iterator[tuple[Entry, SafeString]]:
        """What happened, and to whom, where that is not the row of the page.

        Of the others, what is yet to come is left to their own pages.
        """
        focus = self._timeline.focus
        for entry in self._timeline.entries:
            if entry.member == focus:
                yield replace(entry, result=indented(entry.result)), SafeString("")
            elif self._links[entry.member] is not None and not entry.ahead:
                yield entry, self._linked(entry.member)

    @property
    def tree(self) -> list[Any]:
        """The members as ``unordered_list`` takes them; empty if there is one alone."""
        members = self._timeline.members
        lists: list[list[Any]] = [[]]
        for depth, member in members if len(members) > 1 else ():
            del lists[depth + 1 :]
            while len(lists) <= depth:
                lists.append([])
                lists[-2].append(lists[-1])
            lists[depth].append(self._described(member))
        return lists[0]

    def _described(self, member: Member) -> SafeString:
        if member == self._timeline.focus:
            return format_html('<strong aria-current="page">{}</strong>', member.title)
        if member.kind == MISSING:
            return format_html("{} {}", _("Purged, rolled back or elsewhere:"), member.key)
        if self._links[member] is None:
            return format_html('<span class="quiet">{}</span>', _("You may not see this one."))
        return format_html(
            '{} <span class="quiet">{}, {}</span>', self._linked(member), member.key, member.state
        )

    def _linked(self, member: Member) -> SafeString:
        address = self._links[member]
        if not address:
            return format_html("{}", member.title)
        return format_html('<a href="{}">{}</a>', address, member.title)
