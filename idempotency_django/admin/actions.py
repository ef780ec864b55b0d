"""The actions of an operator on records: settle an interrupted one, and delete."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from django import forms
from django.contrib.admin.models import DELETION
from django.contrib.admin.widgets import (
    AdminIntegerFieldWidget,
    AdminRadioSelect,
    AdminTextareaWidget,
)
from django.db.models import QuerySet
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ..contrib.timeline import HELD, STATES, Moment, state_of
from ..models import INTERRUPTED, NO_OWNER, DatabaseNow, IdempotencyKey, IdempotencyStep
from ..stores import Payload, Status, encode, stores
from .base import Action

__all__ = ["ACTIONS"]


class KeyAction(Action):
    """One of the things that an operator can do to records."""

    def apply(self, rows: Sequence[Any], given: Mapping[str, Any], by: str) -> Mapping[Any, str]:
        for store in stores.all():
            for row in rows if store.has_cache else ():
                store.forget(row.key, row.scope)
        chosen = IdempotencyKey._base_manager.using(rows[0]._state.db)
        self.change(chosen.filter(pk__in=[row.pk for row in rows]), given, by)
        return {}

    def change(self, rows: QuerySet[Any], given: Mapping[str, Any], by: str) -> None:
        """Do it to these rows; every store has forgotten them."""
        raise NotImplementedError


class Remove(KeyAction):
    """Delete the record and its steps."""

    name = "remove"
    title = gettext_lazy("Delete idempotency keys")
    button = gettext_lazy("Delete")
    permission = "remove"
    flag = DELETION
    effects = (
        gettext_lazy("The keys and their steps are no longer available for an audit."),
        gettext_lazy(
            "The next request with such a key is executed from the beginning, even if it is a "
            "retry of an executed request."
        ),
    )
    log = gettext_lazy("Deleted; the next request with this key is executed.")
    done = gettext_lazy("deleted")

    def refusal(self, row: Any, given: Mapping[str, Any]) -> str:
        if state_of(row) != Status.IN_PROGRESS:
            return ""
        return _("A key in progress can be deleted only after its lease has ended.")

    def change(self, rows: QuerySet[Any], given: Mapping[str, Any], by: str) -> None:
        rows.delete()


COMPLETE: Final = "complete"
RELEASE: Final = "release"

JSON: Final = "application/json"
_TYPES: Final = (JSON, "application/problem+json", "application/xml", "text/plain; charset=utf-8")
_BODILESS: Final = (204, 205, 304)  # RFC 9110


class SettleForm(forms.Form):
    """What became of an operation, why that is known, and the response of a completed one."""

    # The attempt that the operator has seen: the next one may have come further.
    attempt = forms.IntegerField(widget=forms.HiddenInput)
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
    content_type = forms.ChoiceField(
        label=gettext_lazy("Content type"),
        choices=[*((each, each) for each in _TYPES), ("", gettext_lazy("none: the body is empty"))],
        initial=JSON,
        required=False,
    )
    body = forms.CharField(
        label=gettext_lazy("Body"),
        help_text=gettext_lazy("Stored unchanged, in UTF-8."),
        required=False,
        strip=False,
        widget=AdminTextareaWidget(attrs={"rows": 12, "spellcheck": "false"}),
    )

    def clean(self) -> dict[str, Any]:
        given = self.cleaned_data
        if given.get("outcome") != COMPLETE:
            return given | {"done": _("Released for retry")}
        # Browsers send each line end as two characters.
        body = given.get("body", "").replace("\r\n", "\n")
        declared = "" if given.get("status") in _BODILESS else given.get("content_type", "")
        if body and not declared:
            self.add_error("body", _("Remove the body, or choose another status or type."))
        if "body" in given and declared.endswith("json"):
            try:
                json.loads(body)
            except (ValueError, RecursionError) as error:
                self.add_error("body", _("Invalid JSON: %(error)s.") % {"error": error})
        done = _("Completed by hand with status %(status)s and %(size)d bytes of body")
        return given | {
            "payload": Payload(
                given.get("status", 200),
                (("Content-Type", declared),) if declared else (),
                body.encode(),
            ),
            "done": done % {"status": given.get("status"), "size": len(body.encode())},
        }


class Settle(KeyAction):
    """Settle one interrupted record: it was done, or it is released for the next retry."""

    name = "settle"
    title = gettext_lazy("Settle an interrupted operation")
    button = gettext_lazy("Settle")
    for_many = False
    form = SettleForm
    log = gettext_lazy("%(done)s: %(reason)s")
    done = gettext_lazy("settled")

    def offers(self, row: Any) -> bool:
        return state_of(row) in (INTERRUPTED, HELD)

    def initial(self, row: Any) -> dict[str, Any]:
        return {"attempt": row.attempt}

    def refusal(self, row: Any, given: Mapping[str, Any]) -> str:
        if not self.offers(row):
            values = {"state": STATES[state_of(row)]}
            return _("Only an interrupted record can be settled; this one is %(state)s.") % values
        if given.get("attempt", row.attempt) != row.attempt:
            text = _(
                "Attempt %(attempt)d has started since you opened this page, and was interrupted "
                "too."
            )
            return text % {"attempt": row.attempt}
        ends = Moment(row.expires_at, row.now)
        if given.get("outcome") == COMPLETE and not ends.ahead:
            return _(
                "Its time to live ended at %(time)s (%(age)s), so a retry would execute the "
                "operation again and not get this response. Release it, or delete it."
            ) % {"time": ends.exactly, "age": ends.age}
        return ""

    def consequences(self, rows: Sequence[Any]) -> Iterator[str]:
        yield _(
            "If it was done, nothing is executed: every retry gets the response that you enter, "
            "until the record expires (%(age)s)."
        ) % {"age": Moment(rows[0].expires_at, rows[0].now).age}
        yield _("If you release it, nothing happens until the next retry.")
        yield _resumption(rows[0])
        yield _(
            "All other effects of the last attempt then happen a second time, unless they were "
            "rolled back or the other service recognises their derived key. Check what happened "
            "first."
        )
        yield _("If the original process is still running, it can no longer complete.")

    def change(self, rows: QuerySet[Any], given: Mapping[str, Any], by: str) -> None:
        rows.update(
            # An owner that is still alive no longer owns it.
            owner_token=NO_OWNER,
            lease_expires_at=None,
            completed_at=DatabaseNow(),
            **(_completed(given["payload"]) if "payload" in given else _released(given, by)),
        )


def _completed(payload: Payload) -> dict[str, Any]:
    status, headers, body = encode(payload)
    return {
        "status": Status.COMPLETED,
        "response_status": status,
        "response_headers": headers,
        "response_body": body,
        "error": "",
    }


def _released(given: Mapping[str, Any], by: str) -> dict[str, Any]:
    return {
        "status": Status.FAILED,
        "pinned": True,  # the attempt's external effects belong to this request
        "error": _("Released by %(user)s: %(reason)s") % {**given, "user": by},
    }


def _resumption(record: Any) -> str:
    """Says where the next attempt begins."""
    steps = IdempotencyStep.objects.using(record._state.db).filter(record=record.pk).count()
    ends = Moment(record.expires_at, record.now)
    if not steps:
        return _("The retry starts from the beginning, because no step is stored.")
    if not ends.ahead:
        return _(
            "The retry starts from the beginning, because the time to live has ended (%(age)s). "
            "It runs the stored steps a second time."
        ) % {"age": ends.age}
    return ngettext(
        "The retry resumes after the one stored step and doesn't run it again.",
        "The retry resumes after the last of the %(steps)d stored steps and doesn't run them "
        "again.",
        steps,
    ) % {"steps": steps}


ACTIONS: Final[Sequence[Action]] = (Settle(), Remove())
