"""The actions of an operator on records: expire and delete them, complete or release one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from django import forms
from django.contrib.admin.models import DELETION
from django.contrib.admin.widgets import (
    AdminIntegerFieldWidget,
    AdminTextareaWidget,
    AdminTextInputWidget,
)
from django.core.exceptions import ValidationError
from django.core.validators import RegexValidator
from django.db.models import F, QuerySet
from django.db.models.functions import Coalesce
from django.utils.http import parse_header_parameters
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ..contrib.timeline import HELD, STATES, Moment, state_of
from ..models import INTERRUPTED, NO_OWNER, DatabaseNow, IdempotencyKey, IdempotencyStep
from ..stores import stores
from ..stores.codec import encode
from ..stores.records import Payload, Status
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


class Expire(KeyAction):
    """End the replays; the record stays for its retention."""

    name = "expire"
    title = gettext_lazy("Expire idempotency keys")
    button = gettext_lazy("Expire")
    permission = "delete"
    effects = (
        gettext_lazy("Their responses are no longer replayed."),
        gettext_lazy(
            "The next request with such a key is executed, even if it is a retry of an executed "
            "request, unless its policy has on_expired='refuse'."
        ),
    )
    log = gettext_lazy("Expired; no request gets its response any more.")
    done = gettext_lazy("expired")

    def refusal(self, row: Any, given: Mapping[str, Any]) -> str:
        if row.status == Status.COMPLETED and Moment(row.expires_at, row.now).ahead:
            return ""
        return _("Only completed keys that have not expired yet can be expired.")

    def change(self, rows: QuerySet[Any], given: Mapping[str, Any], by: str) -> None:
        now, retention = DatabaseNow(), F("purge_at") - F("expires_at")
        rows.update(purge_at=Coalesce(now + retention, now), expires_at=now)


class Delete(KeyAction):
    """Remove the record and its steps."""

    name = "delete"
    title = gettext_lazy("Delete idempotency keys")
    permission = "delete"
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


class SettleForm(forms.Form):
    """The form for settling a record: the displayed attempt, and a reason."""

    # The next attempt may have come further.
    attempt = forms.IntegerField(widget=forms.HiddenInput)
    reason = forms.CharField(
        label=gettext_lazy("Reason"),
        help_text=gettext_lazy("Describe what you found. The reason is logged."),
        max_length=1000,
        widget=AdminTextareaWidget(attrs={"rows": 3}),
    )


class Settlement(KeyAction):
    """Settles one record that was interrupted, in one way or the other."""

    for_many = False
    form = SettleForm

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
        return ""

    def change(self, rows: QuerySet[Any], given: Mapping[str, Any], by: str) -> None:
        rows.update(
            # An owner that is still alive no longer owns it.
            owner_token=NO_OWNER,
            lease_expires_at=None,
            completed_at=DatabaseNow(),
            **self.columns(given, by),
        )

    def columns(self, given: Mapping[str, Any], by: str) -> dict[str, Any]:
        """The additional columns of the settled row."""
        raise NotImplementedError


BODILESS: Final = (204, 205, 304)
"""Status codes of responses without a body (RFC 9110)."""

_NAME: Final = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_MEDIA_TYPE: Final = re.compile(
    rf"{_NAME}/{_NAME}( *; *{_NAME}=({_NAME}|\"[ !#-\[\]-~]*\"))*\Z"  # RFC 9110, section 8.3.1
)


class CompleteForm(SettleForm):
    """Status code, content type and body of a response, such as a handler could have given."""

    status = forms.IntegerField(
        label=gettext_lazy("Status code"),
        min_value=200,
        max_value=499,
        initial=200,
        widget=AdminIntegerFieldWidget,
    )
    content_type = forms.CharField(
        label=gettext_lazy("Content type"),
        max_length=255,
        initial="application/json",
        required=False,
        validators=[
            RegexValidator(
                _MEDIA_TYPE, gettext_lazy("Enter a media type, for example application/json.")
            )
        ],
        widget=AdminTextInputWidget,
    )
    body = forms.CharField(
        label=gettext_lazy("Body"),
        help_text=gettext_lazy("Stored unchanged, in UTF-8."),
        required=False,
        strip=False,
        widget=AdminTextareaWidget(attrs={"rows": 12, "spellcheck": "false"}),
    )

    field_order = ("attempt", "status", "content_type", "body", "reason")

    def clean_content_type(self) -> str:
        """A type that is true of a body in UTF-8."""
        declared: str = self.cleaned_data["content_type"]
        media_type, parameters = parse_header_parameters(declared)
        charset = parameters.get("charset")
        if charset is None and media_type.startswith("text/"):
            return f"{declared}; charset=utf-8"
        if charset is not None and charset.lower() not in ("utf-8", "utf8"):
            raise ValidationError(_("Remove the charset: the body is always stored in UTF-8."))
        return declared

    def clean_body(self) -> bytes:
        """The text that was entered: browsers send each of its line ends as two characters."""
        entered: str = self.cleaned_data["body"]
        return entered.replace("\r\n", "\n").encode()

    def clean(self) -> dict[str, Any]:
        given = self.cleaned_data
        body, declared = given.get("body"), given.get("content_type", "")
        bodiless = given.get("status") in BODILESS
        if body and bodiless:
            self.add_error(
                "body", _("A response with this status code has no body. Remove the body.")
            )
        if body and given.get("content_type") == "":
            self.add_error("content_type", _("Enter the media type of the body."))
        media_type, _parameters = parse_header_parameters(declared)
        if body is not None and not bodiless and media_type.endswith(("/json", "+json")):
            self._check_json(body)
        given["size"] = len(body or b"")
        given["headers"] = (("Content-Type", declared),) if declared and not bodiless else ()
        return given

    def _check_json(self, body: bytes) -> None:
        if not body:
            self.add_error("body", _("Enter JSON, such as null, or leave out the content type."))
            return
        try:
            json.loads(body.decode())
        except (ValueError, RecursionError) as error:
            self.add_error("body", _("Invalid JSON: %(error)s.") % {"error": error})


class Complete(Settlement):
    """Complete by hand: the operation has been done, and this is its response."""

    name = "complete"
    title = button = gettext_lazy("Complete by hand")
    form = CompleteForm
    log = gettext_lazy(
        "Completed by hand with status %(status)d and %(size)d bytes of body: %(reason)s"
    )
    done = gettext_lazy("completed by hand")

    def consequences(self, rows: Sequence[Any]) -> Iterator[str]:
        until = Moment(rows[0].expires_at, rows[0].now)
        if until.at is None:
            yield _("Every retry gets this response, and nothing is executed.")
        else:
            text = _(
                "Until %(time)s (%(age)s), every retry gets this response, and nothing is executed."
            )
            yield text % {"time": until.exactly, "age": until.age}
        yield _("This doesn't run or undo anything. Check what happened first.")
        yield _(
            "If the original process is still running, it can no longer complete. Its client gets "
            "this response."
        )

    def refusal(self, row: Any, given: Mapping[str, Any]) -> str:
        refusal, ends = super().refusal(row, given), Moment(row.expires_at, row.now)
        if refusal or ends.ahead:
            return refusal
        return _(
            "Its time to live ended at %(time)s (%(age)s), so a retry would execute the operation "
            "again and not get this response. Leave it unchanged, release it or delete it."
        ) % {"time": ends.exactly, "age": ends.age}

    def columns(self, given: Mapping[str, Any], by: str) -> dict[str, Any]:
        status, headers, body = encode(Payload(given["status"], given["headers"], given["body"]))
        return {
            "status": Status.COMPLETED,
            "response_status": status,
            "response_headers": headers,
            "response_body": body,
            "error": "",
        }


class Release(Settlement):
    """Release for retry: the next retry executes the operation again."""

    name = "release"
    title = button = gettext_lazy("Release for retry")
    log = gettext_lazy("Released for retry: %(reason)s")
    done = gettext_lazy("released; the next retry is executed")

    def consequences(self, rows: Sequence[Any]) -> Sequence[str]:
        return [
            _("The next retry executes the operation again. Without a retry, nothing happens."),
            _resumption(rows[0]),
            _(
                "All other effects of the last attempt happen a second time, unless they were "
                "rolled back or the other service recognises their derived key. Check what "
                "happened first."
            ),
            _("If the original process is still running, it can no longer complete."),
        ]

    def columns(self, given: Mapping[str, Any], by: str) -> dict[str, Any]:
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
    resumed = ngettext(
        "The retry resumes after the one stored step and doesn't run it again.",
        "The retry resumes after the last of the %(steps)d stored steps and doesn't run them "
        "again.",
        steps,
    ) % {"steps": steps}
    if ends.at is None:
        return resumed
    limit = _("A retry after %(time)s (%(age)s) starts from the beginning.")
    return f"{resumed} {limit % {'time': ends.exactly, 'age': ends.age}}"


ACTIONS: Final[Sequence[Action]] = (Expire(), Delete(), Complete(), Release())
