"""The admin of idempotency keys: inspect requests, and settle interrupted ones.

Stored responses, results of steps and errors carry personal data, and a fingerprint is a digest of
such data. They are fetched for holders of the permission ``idempotency_django.view_response`` only,
on the page of one record. No list shows them, searches or filters by them.

The list opens as fast with ten million records as with ten: what it finds, an index leads to, or it
is among the newest records.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from http.client import responses as reasons
from typing import Any, Final

from django import forms
from django.contrib import admin
from django.contrib.admin.widgets import (
    AdminIntegerFieldWidget,
    AdminRadioSelect,
    AdminTextareaWidget,
)
from django.db.models import Q, QuerySet, Subquery
from django.db.models.functions import Coalesce
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..contrib.timeline import CONFIDENTIAL, HELD, STATES, administered, state_of
from ..models import (
    INTERRUPTED,
    NO_OWNER,
    DatabaseNow,
    IdempotencyKey,
    IdempotencyKeyQuerySet,
    IdempotencyStep,
    unlocked,
)
from ..stores import Payload, Status, decode, derived_key, encode, reference, stores
from .base import LONGEST_TEXT, Action, ListAdmin, preformatted

__all__ = ["Action", "IdempotencyKeyAdmin", "ListAdmin", "preformatted"]

NEWEST: Final = 100_000
"""The number of the newest records that a filter or a search looks at, where no index helps."""
FOUND: Final = 100
"""The most records that a search finds by what has no index."""

_AFTER_ASCII: Final = "\x7f"

COMPLETE: Final = "complete"
RELEASE: Final = "release"

_BODILESS: Final = (204, 205, 304)  # RFC 9110


# What an operator does.


class SettleForm(forms.Form):
    """What became of an operation, why that is known, and the response of a completed one."""

    outcome = forms.ChoiceField(
        label=_("Outcome"),
        choices=[
            (COMPLETE, _("It was done. Every retry gets the response below.")),
            (
                RELEASE,
                _("It was not done, or can safely run again. The next retry executes it."),
            ),
        ],
        widget=AdminRadioSelect(attrs={"class": "radiolist"}),
    )
    reason = forms.CharField(
        label=_("Reason"),
        help_text=_("Describe what you found. The reason is logged."),
        max_length=1000,
        widget=AdminTextareaWidget(attrs={"rows": 3}),
    )
    status = forms.IntegerField(
        label=_("Status code"),
        min_value=200,
        max_value=499,
        initial=200,
        widget=AdminIntegerFieldWidget,
    )
    body = forms.JSONField(
        label=_("Body"),
        help_text=_("JSON, or empty."),
        required=False,
        widget=AdminTextareaWidget(attrs={"rows": 12, "spellcheck": "false"}),
    )

    def clean(self) -> dict[str, Any]:
        given = self.cleaned_data
        done = gettext("Completed by hand with status %(status)s")
        if given.get("outcome") == RELEASE:
            done = gettext("Released for retry")
        elif given.get("status") in _BODILESS and given.get("body") is not None:
            self.add_error("body", gettext("A response with this status has no body."))
        return given | {"done": done % {"status": given.get("status")}}


class Settle(Action):
    """Settle interrupted records: they were done, or are released for the next retry."""

    name = "settle"
    short_description = _("Settle interrupted operations")
    form = SettleForm
    effects = (
        _(
            "If it was done, nothing is executed: every retry gets the response that you enter, "
            "until the record expires."
        ),
        _(
            "If you release it, nothing happens until the next retry. That resumes after the last "
            "stored step, or begins from the start if no step is stored."
        ),
        _(
            "All other effects of the last attempt then happen a second time, unless they were "
            "rolled back or the other service recognises their derived key. Check what happened "
            "first."
        ),
        _("If the original process is still running, it can no longer complete."),
    )
    log = _("%(done)s: %(reason)s")
    done = _("settled")

    def fits(self, row: Any) -> bool:
        return state_of(row) in (INTERRUPTED, HELD)

    def apply(
        self, rows: QuerySet[Any], given: Mapping[str, Any], by: str
    ) -> Iterable[tuple[Any, str]]:
        free = {row.pk: row for row in unlocked(rows)}
        outcomes = [(row, self._refusal(free.get(row.pk), given)) for row in rows]
        chosen = [row for row, refusal in outcomes if not refusal]
        for store in (each for each in stores.all() if each.has_cache):
            for row in chosen:
                store.forget(row.key, row.scope)
        records = IdempotencyKey._base_manager.using(rows.db)
        records.filter(pk__in=[row.pk for row in chosen]).update(
            owner_token=NO_OWNER,  # an owner that is still alive no longer owns it
            lease_expires_at=None,
            completed_at=DatabaseNow(),
            **_completed(given) if given["outcome"] == COMPLETE else _released(given, by),
        )
        return outcomes

    def _refusal(self, row: Any, given: Mapping[str, Any]) -> str:
        if row is None:
            return gettext("It is in use now, or was deleted. Try again later.")
        if not self.fits(row):
            values = {"state": STATES[state_of(row)]}
            return (
                gettext("Only an interrupted record can be settled; this one is %(state)s.")
                % values
            )
        if given["outcome"] == COMPLETE and row.expires_at and row.expires_at <= row.now:
            return gettext(
                "Its time to live has ended, so a retry would execute the operation again and not "
                "get this response. Release it."
            )
        return ""


def _completed(given: Mapping[str, Any]) -> dict[str, Any]:
    body = b"" if given["body"] is None else json.dumps(given["body"]).encode()
    headers = (("Content-Type", "application/json"),) if body else ()
    code, stored_headers, stored_body = encode(Payload(given["status"], headers, body))
    return {
        "status": Status.COMPLETED,
        "response_status": code,
        "response_headers": stored_headers,
        "response_body": stored_body,
        "error": "",
    }


def _released(given: Mapping[str, Any], by: str) -> dict[str, Any]:
    return {
        "status": Status.FAILED,
        "pinned": True,  # the attempt's external effects belong to this request
        "error": gettext("Released by %(user)s: %(reason)s") % {**given, "user": by},
    }


# What is shown and found.


def among_the_newest(rows: QuerySet[Any]) -> QuerySet[Any]:
    """Those of the rows that are among the newest records."""
    newest = IdempotencyKey._base_manager.using(rows.db).order_by("-pk").values("pk")
    return rows.filter(pk__gte=Coalesce(Subquery(newest[NEWEST - 1 : NEWEST]), 0))


def beginning_with(rows: QuerySet[Any], text: str) -> QuerySet[Any]:
    """The rows whose key, scope, operation, path or principal begins with the text.

    Keys are ASCII and compared byte by byte, so that their index finds them. LIKE would use no
    index on SQLite, which ignores case there, nor on MariaDB. The others have no index, which every
    protected request would pay for: up to ``FOUND`` are found among the newest records.
    """
    if not text:
        return rows
    matching = Q()
    for column in ("operation", "path", "principal"):
        matching |= Q(**{f"{column}__startswith": text})
    keyed = Q()
    if text.isascii():
        beyond = text + _AFTER_ASCII
        matching |= Q(scope__gte=text, scope__lt=beyond)
        keyed = Q(key__gte=text, key__lt=beyond)
    recent = among_the_newest(rows).filter(matching).order_by("-pk").values_list("pk", flat=True)
    return rows.filter(Q(pk__in=list(recent[:FOUND])) | keyed)


def in_state(rows: Any, state: str) -> Any:
    """The rows in one of ``STATES``."""
    if state == Status.COMPLETED:  # as most are
        return rows.filter(status=state)
    if state == Status.FAILED:
        return among_the_newest(rows).filter(status=state)
    unfinished = rows.filter(status=Status.IN_PROGRESS)
    if state == Status.IN_PROGRESS:
        return unfinished.filter(lease_expires_at__gt=DatabaseNow())
    return unfinished.filter(lease_expires_at__lte=DatabaseNow(), hold=state == HELD)


class StateFilter(admin.SimpleListFilter):
    """By what the list says of their status."""

    title = _("state")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return list(STATES.items())

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        state = self.value()
        return in_state(queryset, state) if state in STATES else queryset


@admin.register(IdempotencyKey)
class IdempotencyKeyAdmin(ListAdmin):
    """Lists and shows the records, where the default store writes them."""

    actions = (Settle(),)
    settle_permission = "idempotency_django.settle"
    secret = CONFIDENTIAL
    view_permission = "idempotency_django.view_response"
    list_display = (
        "key",
        "status_shown",
        "operation",
        "created_at",
        "attempt",
        "replay_count",
    )
    ordering = ("-pk",)
    list_filter = (StateFilter,)
    search_fields = ("key", "scope", "operation", "path", "principal")
    search_help_text = _(
        "Finds keys that begin with this text. Among the newest 100,000 records, it also finds the "
        "last 100 with a matching scope, operation, path or principal."
    )
    fields = (
        *("key", "scope", "operation", "principal", "method", "path"),
        *("status_shown", "attempt", "replay_count"),
    )
    change_form_template = "admin/idempotency_django/idempotencykey/change_form.html"

    def stored(self) -> QuerySet[Any]:
        return IdempotencyKeyQuerySet(IdempotencyKey, using=administered())

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        return beginning_with(queryset, search_term.strip()), False

    @admin.display(description=_("state"))
    def status_shown(self, record: Any) -> SafeString:
        state, code = state_of(record), record.response_status if record.path else None
        shown = '<span class="idempotency-{}">{}</span> {}'
        return format_html(shown, state, STATES[state], code or "")

    def results_of(self, request: HttpRequest, row: Any) -> str:
        return reference(row.key, row.scope) if self.has_secret_permission(request) else ""

    def render_change_form(
        self, request: HttpRequest, context: Any, *args: Any, **options: Any
    ) -> HttpResponse:
        record = options["obj"]
        context["may_view_response"] = self.has_secret_permission(request)
        context["interrupted"] = state_of(record) in (INTERRUPTED, HELD)
        if context["may_view_response"]:
            # From where the record is; a deferred column comes from a router's.
            rows = self.get_queryset(request).filter(pk=record.pk).defer(None)
            context |= _confidential(get_object_or_404(rows), request.GET.get("name", ""))
        return super().render_change_form(request, context, *args, **options)


def _confidential(record: Any, name: str) -> dict[str, Any]:
    """The stored response of a record or what its last attempt failed with, its fingerprint, and
    the keys that its handler derived: by the names of its steps, and by a name that was typed.
    """
    code = record.response_status
    payload = decode(code, record.response_headers, record.response_body)
    known = {"scope": record.scope, "key": record.key, "fingerprint": record.fingerprint}
    steps = IdempotencyStep.objects.using(record._state.db).filter(record=record).order_by("pk")
    names = dict.fromkeys([*steps.values_list("name", flat=True), *filter(None, [name])])
    return {
        "error": record.error,
        "fingerprint": record.fingerprint,
        "response": code is not None,
        "status": f"{code} {reasons.get(code, '')}".strip() if record.path else _("Result"),
        "headers": payload.headers if record.path else (),
        "body": payload.body,
        "text": (payload.body or b"").decode(errors="backslashreplace")[:LONGEST_TEXT],
        "derived": {each: derived_key(**known, name=each) for each in names},
        "name": name,
    }
