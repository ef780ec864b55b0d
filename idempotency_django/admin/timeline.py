"""The timeline on the admin's page of any member of a chain of causes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from django.contrib.admin import AdminSite, ModelAdmin
from django.contrib.admin.utils import quote
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from ..contrib.timeline import DEEPEST, MISSING, MOST, Entry, Member, Timeline, member_of, trace

_INDENT = "\N{EM SPACE}"


class TimelineMixin(ModelAdmin):  # type: ignore[type-arg]  # not subscriptable at runtime
    """Shows the timeline of the chain of causes on the page of a row that a source knows.

    A user sees only the existence of each row of the chain, unless the row's own page would be
    shown to them.
    """

    change_form_template = "admin/idempotency_django/change_form.html"

    class Media:
        css: ClassVar[dict[str, list[str]]] = {"all": ["idempotency_django/admin.css"]}

    def results_of(self, request: HttpRequest, row: Any) -> str:
        """The reference of the record whose results of steps are shown; empty: of none."""
        return ""

    def render_change_form(
        self, request: HttpRequest, context: Any, *args: Any, **options: Any
    ) -> HttpResponse:
        row = options.get("obj")
        member = member_of(row) if row is not None else None
        if member is not None:
            timeline = trace(member, self.results_of(request, row))
            members = [member for _depth, member in timeline.members]
            context["chain"] = Chain(timeline, _addresses(self.admin_site, request, members))
        return super().render_change_form(request, context, *args, **options)


def _addresses(
    site: AdminSite, request: HttpRequest, members: Iterable[Member]
) -> dict[Member, str]:
    """The pages of the members that the user may see; empty where one has no page."""
    addresses: dict[Member, str] = {}
    by_table: dict[Any, list[Member]] = {}
    for member in members:
        if member.row is not None:
            by_table.setdefault((type(member.row), member.where), []).append(member)
    for (model, where), found in by_table.items():
        page = site._registry.get(model)
        if page is None or not page.has_view_permission(request):
            continue
        rows = page.get_queryset(request)
        here = rows.using(where).filter(pk__in=[member.row.pk for member in found])
        allowed = set(here.values_list("pk", flat=True))
        name = f"admin:{model._meta.app_label}_{model._meta.model_name}_change"
        for member in (each for each in found if each.row.pk in allowed):
            address = reverse(name, args=[quote(member.row.pk)], current_app=site.name)
            # The page of another database's row would be that of another row.
            addresses[member] = address if where == rows.db else ""
    return addresses


@dataclass(frozen=True)
class Chain:
    """A timeline as the template shows it.

    Attributes:
        timeline: the timeline.
        addresses: the pages of its members that the user may view.
        most: how many members a timeline holds.
        deepest: how many causes or effects one after the other.
    """

    timeline: Timeline
    addresses: dict[Member, str]
    most = MOST
    deepest = DEEPEST

    @property
    def entries(self) -> Iterator[tuple[Entry, SafeString]]:
        """The entries, each with its member where that is not the row of the page.

        Of the others, what is yet to come is left to their own pages.
        """
        for entry in self.timeline.entries:
            if entry.member == self.timeline.focus:
                yield entry, SafeString("")
            elif entry.member in self.addresses and not entry.ahead:
                yield entry, self._linked(entry.member)

    @property
    def causes(self) -> list[SafeString]:
        """The members, each indented below its cause; empty if there is one alone."""
        members = self.timeline.members
        lines = [
            format_html("{}{}", _INDENT * depth, self._described(each)) for depth, each in members
        ]
        return lines if len(members) > 1 else []

    def _described(self, member: Member) -> SafeString:
        if member == self.timeline.focus:
            return format_html('<strong aria-current="page">{}</strong>', member.title)
        if member.kind == MISSING:
            return format_html("{} {}", _("Purged, rolled back or elsewhere:"), member.key)
        if member not in self.addresses:
            return format_html(
                '<span class="quiet">{}</span>', _("You don't have permission to view it.")
            )
        return format_html(
            '{} <span class="quiet">{}, {}</span>', self._linked(member), member.key, member.state
        )

    def _linked(self, member: Member) -> SafeString:
        address = self.addresses[member]
        if not address:
            return format_html("{}", member.title)
        return format_html('<a href="{}">{}</a>', address, member.title)
