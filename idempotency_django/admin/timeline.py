"""The timeline on the admin's page of any member of a chain of causes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from django.contrib.admin import AdminSite
from django.contrib.admin.utils import quote
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from ..contrib.timeline import MISSING, Entry, Member, Timeline, member_of, trace

_INDENT = "\N{EM SPACE}"


def context_of(site: AdminSite, request: HttpRequest, row: Any, results_of: str) -> dict[str, Any]:
    """What the page of a row shows of its chain of causes; empty: no source knows its table.

    A user sees only the existence of each row of the chain, unless the row's own page would be
    shown to them.

    Args:
        site: the admin.
        request: of the user.
        row: of the page.
        results_of: the reference of the record whose results of steps are shown; empty: of none.
    """
    member = member_of(row)
    if member is None:
        return {}
    timeline = trace(member, results_of)
    members = [member for _depth, member in timeline.members]
    links = _links(site, request, members)
    return {
        "timeline": timeline,
        "entries": _entries(timeline, links),
        "causes": _causes(timeline, links) if len(members) > 1 else [],
    }


def _links(
    site: AdminSite, request: HttpRequest, members: Iterable[Member]
) -> dict[Member, SafeString]:
    """The titles of the members that the user may see, as links to their pages; else empty."""
    links = dict.fromkeys(members, SafeString(""))
    by_table: dict[Any, list[Member]] = {}
    for member in links:
        if member.row is not None and site.is_registered(type(member.row)):
            by_table.setdefault((type(member.row), member.where), []).append(member)
    for (model, where), found in by_table.items():
        page = site.get_model_admin(model)
        if not page.has_view_permission(request):
            continue
        rows = page.get_queryset(request)
        here = rows.using(where).filter(pk__in=[member.row.pk for member in found])
        allowed = set(here.values_list("pk", flat=True))
        name = f"admin:{model._meta.app_label}_{model._meta.model_name}_change"
        # The page of another database's row would be that of another row.
        shown = '<a href="{}">{}</a>' if where == rows.db else "{1}"
        for member in (each for each in found if each.row.pk in allowed):
            address = reverse(name, args=[quote(member.row.pk)], current_app=site.name)
            links[member] = format_html(shown, address, member.title)
    return links


def _entries(
    timeline: Timeline, links: dict[Member, SafeString]
) -> Iterator[tuple[Entry, SafeString]]:
    """The entries, each with its member where that is not the row of the page.

    Of the others, what is yet to come is left to their own pages.
    """
    for entry in timeline.entries:
        if entry.member == timeline.focus:
            yield entry, SafeString("")
        elif links[entry.member] and not entry.ahead:
            yield entry, links[entry.member]


def _causes(timeline: Timeline, links: dict[Member, SafeString]) -> Iterator[SafeString]:
    """The members, each indented below its cause."""
    for depth, member in timeline.members:
        if member == timeline.focus:
            line = format_html('<strong aria-current="page">{}</strong>', member.title)
        elif member.kind == MISSING:
            line = format_html("{} {}", _("Purged, rolled back or elsewhere:"), member.key)
        elif not links[member]:
            denied = _("You don't have permission to view it.")
            line = format_html('<span class="quiet">{}</span>', denied)
        else:
            shown = '{} <span class="quiet">{}, {}</span>'
            line = format_html(shown, links[member], member.key, member.state)
        yield format_html("{}{}", _INDENT * depth, line)
