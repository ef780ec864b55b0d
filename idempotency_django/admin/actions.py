"""The action of an operator on records: settle the interrupted ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from django import forms
from django.contrib.admin.widgets import (
    AdminIntegerFieldWidget,
    AdminRadioSelect,
    AdminTextareaWidget,
)
from django.db.models import QuerySet
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..contrib.timeline import HELD, STATES, state_of
from ..models import INTERRUPTED, NO_OWNER, DatabaseNow, IdempotencyKey, unlocked
from ..stores import Payload, Status, encode, stores
from .base import Action

COMPLETE: Final = "complete"
RELEASE: Final = "release"

_BODILESS: Final = (204, 205, 304)  # RFC 9110


class SettleForm(forms.Form):
    """What became of an operation, why that is known, and the response of a completed one."""

    outcome = forms.ChoiceField(
        label=gettext_lazy("Outcome"),
        choices=[
            (COMPLETE, gettext_lazy("It was done. Every retry gets the response below.")),
            (
                RELEASE,
                gettext_lazy(
                    "It was not done, or can safely run again. The next retry executes it."
                ),
            ),
        ],
        widget=AdminRadioSelect(attrs={"class": "radiolist"}),
    )
    reason = forms.CharField(
        label=gettext_lazy("Reason"),
        help_text=gettext_lazy("Describe what you found. The reason is logged."),
        max_length=1000,
        widget=AdminTextareaWidget(attrs={"rows": 3}),
    )
    status = forms.IntegerField(
        label=gettext_lazy("Status code"),
        min_value=200,
        max_value=499,
        initial=200,
        widget=AdminIntegerFieldWidget,
    )
    body = forms.JSONField(
        label=gettext_lazy("Body"),
        help_text=gettext_lazy("JSON, or empty."),
        required=False,
        widget=AdminTextareaWidget(attrs={"rows": 12, "spellcheck": "false"}),
    )

    def clean(self) -> dict[str, Any]:
        given = self.cleaned_data
        done = _("Completed by hand with status %(status)s")
        if given.get("outcome") == RELEASE:
            done = _("Released for retry")
        elif given.get("status") in _BODILESS and given.get("body") is not None:
            self.add_error("body", _("A response with this status has no body."))
        return given | {"done": done % {"status": given.get("status")}}


class Settle(Action):
    """Settle interrupted records: they were done, or are released for the next retry."""

    name = "settle"
    short_description = gettext_lazy("Settle interrupted operations")
    form = SettleForm
    effects = (
        gettext_lazy(
            "If it was done, nothing is executed: every retry gets the response that you enter, "
            "until the record expires."
        ),
        gettext_lazy(
            "If you release it, nothing happens until the next retry. That resumes after the last "
            "stored step, or begins from the start if no step is stored."
        ),
        gettext_lazy(
            "All other effects of the last attempt then happen a second time, unless they were "
            "rolled back or the other service recognises their derived key. Check what happened "
            "first."
        ),
        gettext_lazy("If the original process is still running, it can no longer complete."),
    )
    log = gettext_lazy("%(done)s: %(reason)s")
    done = gettext_lazy("settled")

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
            return _("It is in use now, or was deleted. Try again later.")
        if not self.fits(row):
            values = {"state": STATES[state_of(row)]}
            return _("Only an interrupted record can be settled; this one is %(state)s.") % values
        if given["outcome"] == COMPLETE and row.expires_at and row.expires_at <= row.now:
            return _(
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
        "error": _("Released by %(user)s: %(reason)s") % {**given, "user": by},
    }
