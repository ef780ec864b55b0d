"""What an operator can do to records: each action asks first, is logged, spares what is in use.

A new action is a subclass of :class:`~.base.Action` in the list below. It gets a page for one
record and a button that leads there; if it is ``for_many``, the list of records offers it too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, ClassVar, Final

from django import forms
from django.contrib import admin, messages
from django.contrib.admin import ModelAdmin, helpers
from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.contrib.admin.utils import quote
from django.contrib.admin.widgets import (
    AdminIntegerFieldWidget,
    AdminTextareaWidget,
    AdminTextInputWidget,
)
from django.core.exceptions import ValidationError
from django.core.validators import RegexValidator
from django.db import connections, transaction
from django.db.models import F, QuerySet
from django.db.models.functions import Coalesce
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.http import parse_header_parameters
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ..codec import encode
from ..models import NO_OWNER, DatabaseNow, IdempotencyStep
from ..records import Payload, Status
from ..stores import stores
from ..timeline import HELD, INTERRUPTED, STATES, Moment, state_of

__all__ = ["ACTIONS", "Action"]


class Action(forms.Form):
    """One of the things that an operator can do; its fields are what the operator enters for it.

    Attributes:
        name: of its page; the list calls it ``<name>_selected``.
        title: what is going to be done.
        button: what leads to its page from a record's; empty if Django's own button does.
        permission: who may do it: the admin's method ``has_<permission>_permission`` says.
        for_many: whether records can be selected for it in the list.
        leads_to: the admin's page that follows when one record is done.
        flag: the kind of log entry.
    """

    name: ClassVar[str]
    title: ClassVar[Any]
    button: ClassVar[Any] = ""
    permission: ClassVar[str]
    for_many: ClassVar[bool] = False
    leads_to: ClassVar[str] = "changelist"
    flag: ClassVar[int] = CHANGE

    def __init__(self, records: list[Any], data: Any = None) -> None:
        """For these records, as the operator sees them; ``data`` is what the operator sent."""
        super().__init__(data)
        self.records = records

    def offers(self, record: Any) -> bool:
        """Whether the record's page has the button."""
        return not self.refusal(record)

    def refusal(self, record: Any) -> str:
        """Why it cannot be done to the record; empty if it can."""
        raise NotImplementedError

    def consequences(self) -> list[str]:
        """What happens then to the records, for the operator who is asked."""
        raise NotImplementedError

    def apply(self, rows: QuerySet[Any], by: str) -> None:
        """Do it to these rows, which are locked, for the user of this name."""
        raise NotImplementedError

    def logged(self) -> str:
        """The log entry of each record."""
        raise NotImplementedError

    def done(self, count: int) -> str:
        """The message after it was done to that many records."""
        raise NotImplementedError


BODILESS: Final = (204, 205, 304)
"""Status codes of answers that have no body (RFC 9110)."""

_NAME: Final = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_MEDIA_TYPE: Final = re.compile(
    rf"{_NAME}/{_NAME}( *; *{_NAME}=({_NAME}|\"[ !#-\[\]-~]*\"))*\Z"  # RFC 9110, section 8.3.1
)


class AnswerForm(forms.Form):
    """Status code, content type and body of an answer, such as a handler could have given."""

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
        help_text=gettext_lazy("Stored as it is, in UTF-8."),
        required=False,
        strip=False,
        widget=AdminTextareaWidget(attrs={"rows": 12, "spellcheck": "false"}),
    )

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """The answer's headers, once it is valid."""
        media_type = self.cleaned_data["content_type"]
        if not media_type or self.cleaned_data["status"] in BODILESS:
            return ()
        return (("Content-Type", media_type),)

    @property
    def content(self) -> bytes:
        """The answer's body, once it is valid."""
        body: str = self.cleaned_data["body"]
        return body.encode()

    def clean_content_type(self) -> str:
        """A type that says the truth of a body in UTF-8."""
        declared: str = self.cleaned_data["content_type"]
        media_type, parameters = parse_header_parameters(declared)
        charset = parameters.get("charset")
        if charset is None and media_type.startswith("text/"):
            return f"{declared}; charset=utf-8"
        if charset is not None and charset.lower() not in ("utf-8", "utf8"):
            raise ValidationError(_("The body is stored in UTF-8: leave the charset out."))
        return declared

    def clean_body(self) -> str:
        """The text that was entered: browsers send each of its line ends as two characters."""
        entered: str = self.cleaned_data["body"]
        return entered.replace("\r\n", "\n")

    def clean(self) -> dict[str, Any]:
        body, given = self.cleaned_data.get("body"), self.cleaned_data
        if body and given.get("status") in BODILESS:
            self.add_error("body", _("An answer with this status code has no body."))
        if body and given.get("content_type") == "":
            self.add_error("content_type", _("Enter the media type of the body."))
        media_type, _parameters = parse_header_parameters(given.get("content_type", ""))
        bodiless = given.get("status") in BODILESS
        if body is not None and not bodiless and media_type.endswith(("/json", "+json")):
            self._check_json(body)
        return given

    def _check_json(self, body: str) -> None:
        if not body:
            self.add_error("body", _("Enter JSON, such as null, or leave out the content type."))
            return
        try:
            json.loads(body)
        except (ValueError, RecursionError) as error:
            self.add_error("body", _("This is not JSON: %(error)s.") % {"error": error})


class Settlement(Action):
    """What both ways share: they take one record, and a reason."""

    permission = "settle"
    leads_to = "change"

    # The attempt that the operator has looked at: the next one may have come further.
    attempt = forms.IntegerField(widget=forms.HiddenInput)
    reason = forms.CharField(
        label=gettext_lazy("Reason"),
        help_text=gettext_lazy("What you found out, for people who ask later. It is logged."),
        max_length=1000,
        widget=AdminTextareaWidget(attrs={"rows": 3}),
    )

    def __init__(self, records: list[Any], data: Any = None) -> None:
        super().__init__(records, data)
        [self.record] = records
        self.initial = {"attempt": self.record.attempt}

    def offers(self, record: Any) -> bool:
        return state_of(record) in (INTERRUPTED, HELD)

    def refusal(self, record: Any) -> str:
        if not self.offers(record):
            values = {"state": STATES[state_of(record)]}
            return _("Only an interrupted record can be settled; this one is %(state)s.") % values
        if self.is_bound and self.cleaned_data.get("attempt", record.attempt) != record.attempt:
            values = {"attempt": record.attempt}
            return (
                _("Attempt %(attempt)d has begun since you looked, and was interrupted too.")
                % values
            )
        return ""

    def apply(self, rows: QuerySet[Any], by: str) -> None:
        rows.update(
            # An owner that is still alive no longer owns it.
            owner_token=NO_OWNER,
            lease_expires_at=None,
            completed_at=DatabaseNow(),
            **self.changes(by),
        )

    def changes(self, by: str) -> dict[str, Any]:
        """The columns of the settled row, besides those that both ways change."""
        raise NotImplementedError


class Complete(AnswerForm, Settlement):
    """Complete by hand: the operation has been done, and this is its answer."""

    name = "complete"
    title = button = gettext_lazy("Complete by hand")

    field_order = ("attempt", "status", "content_type", "body", "reason")

    def consequences(self) -> list[str]:
        until = Moment(self.record.expires_at, self.record.now)
        return [
            _("Every retry gets this answer, and nothing is executed.")
            if until.at is None
            else _(
                "Until %(time)s (%(age)s), every retry gets this answer and nothing is executed."
            )
            % {"time": until.exactly, "age": until.age},
            _(
                "What the last attempt has done stays done, and what it has not done, or what was "
                "rolled back, stays undone. Find out which, so that the answer is true."
            ),
            _(
                "If the original process is merely late, it can no longer complete; its client "
                "gets this answer."
            ),
        ]

    def refusal(self, record: Any) -> str:
        because, ends = super().refusal(record), Moment(record.expires_at, record.now)
        if because or ends.ahead:
            return because
        return _(
            "Its time to live ended at %(time)s (%(age)s), so no retry would get the answer: the "
            "operation would be executed again. Leave it as it is, release it or delete it."
        ) % {"time": ends.exactly, "age": ends.age}

    def changes(self, by: str) -> dict[str, Any]:
        answer = encode(Payload(self.cleaned_data["status"], self.headers, self.content))
        return {
            "status": Status.COMPLETED,
            "response_status": answer.status,
            "response_headers": answer.headers,
            "response_body": answer.body,
            "error": "",
        }

    def logged(self) -> str:
        values = {**self.cleaned_data, "size": len(self.content)}
        return (
            _("Completed by hand with status %(status)d and %(size)d bytes of body: %(reason)s")
            % values
        )

    def done(self, count: int) -> str:
        return _("The idempotency key was completed by hand.")


class Release(Settlement):
    """Release for retry: the operation is to be executed again."""

    name = "release"
    title = button = gettext_lazy("Release for retry")

    def consequences(self) -> list[str]:
        return [
            _("The next retry executes the operation again. Without a retry, nothing happens."),
            _resumption(self.record),
            _(
                "Whatever else the last attempt has done, and was not rolled back, is done a "
                "second time, unless the other side recognises it by its derived key. Find that "
                "out first."
            ),
            _("If the original process is merely late, it can no longer complete."),
        ]

    def changes(self, by: str) -> dict[str, Any]:
        values = {"user": by, "reason": self.cleaned_data["reason"]}
        return {
            "status": Status.FAILED,
            "pinned": True,  # what the attempt has done elsewhere was done for this request
            "error": _("Released by %(user)s: %(reason)s") % values,
        }

    def logged(self) -> str:
        return _("Released for retry: %(reason)s") % self.cleaned_data

    def done(self, count: int) -> str:
        return _("The idempotency key was released: the next retry is executed.")


def _resumption(record: Any) -> str:
    """Where the next attempt begins."""
    steps = IdempotencyStep.objects.using(record._state.db).filter(record=record.pk).count()
    ends = Moment(record.expires_at, record.now)
    if not steps:
        return _("It starts from the beginning: none of its steps is stored.")
    if not ends.ahead:
        return _(
            "It starts from the beginning, because its time to live has ended (%(age)s): the "
            "stored steps are done a second time."
        ) % {"age": ends.age}
    resumed = ngettext(
        "It resumes after its one stored step, which is not done again.",
        "It resumes after the last of its %(steps)d stored steps, which are not done again.",
        steps,
    ) % {"steps": steps}
    if ends.at is None:
        return resumed
    limit = _("A retry after %(time)s (%(age)s), however, starts from the beginning.")
    return f"{resumed} {limit % {'time': ends.exactly, 'age': ends.age}}"


MOST: Final = 1_000
"""Records that are selected at once, each of which is logged; a purge is the tool for more."""

TEMPLATE: Final = "admin/idempotency_django/idempotencykey/action.html"


def perform_on_one(
    model_admin: ModelAdmin[Any],
    request: HttpRequest,
    rows: QuerySet[Any],
    record: Any,
    kind: type[Action],
) -> HttpResponse:
    """Ask whether to do it to the record, the one among the rows; once answered, do it."""
    form = kind([record], request.POST if request.method == "POST" else None)
    if not form.is_valid():
        return _question(model_admin, request, form, record)
    if carry_out(form, rows, request.user):
        model_admin.message_user(request, form.done(1), messages.SUCCESS)
    else:
        model_admin.message_user(request, _why_left_alone(form, rows), messages.WARNING)
    page = f"admin:idempotency_django_idempotencykey_{kind.leads_to}"
    arguments = [quote(record.pk)] if kind.leads_to == "change" else []
    site = model_admin.admin_site.name
    return HttpResponseRedirect(reverse(page, args=arguments, current_app=site))


def list_action(kind: type[Action]) -> Callable[..., HttpResponse | None]:
    """The action as the list of records offers it."""

    def action(
        model_admin: ModelAdmin[Any], request: HttpRequest, rows: QuerySet[Any]
    ) -> HttpResponse | None:
        return _perform_on_many(model_admin, request, rows, kind)

    action.__name__ = f"{kind.name}_selected"
    return admin.action(action, permissions=[kind.permission], description=kind.title)


def _perform_on_many(
    model_admin: ModelAdmin[Any], request: HttpRequest, rows: QuerySet[Any], kind: type[Action]
) -> HttpResponse | None:
    """Ask whether to do it; after the answer, do it, report it and return ``None``."""
    selected = rows.order_by().values("pk")[: MOST + 1].count()
    if selected > MOST:
        text = _("At most %(most)d idempotency keys can be selected for this.") % {"most": MOST}
        model_admin.message_user(request, text, messages.ERROR)
        return None
    form = kind(list(rows), request.POST if "post" in request.POST else None)
    if not form.is_valid():
        return _question(model_admin, request, form)
    done = carry_out(form, rows, request.user)
    level = messages.SUCCESS if done else messages.INFO
    model_admin.message_user(request, form.done(done), level)
    if selected > done:
        model_admin.message_user(request, _left_count(selected - done), messages.WARNING)
    return None


def carry_out(form: Action, rows: QuerySet[Any], user: Any) -> int:
    """Log it and do it, in one transaction, to those of the rows that nothing speaks against then.

    What somebody else holds at this moment is left alone. Returns how many it was done to.
    """
    can_skip = connections[rows.db].features.has_select_for_update_skip_locked
    seen = [record.pk for record in form.records if not form.refusal(record)]
    with transaction.atomic(using=rows.db):
        locked = rows.filter(pk__in=seen).select_for_update(skip_locked=can_skip)
        records = [record for record in locked if not form.refusal(record)]
        LogEntry.objects.log_actions(user.pk, records, form.flag, form.logged())
        _forget(records)
        keys = [record.pk for record in records]
        chosen = rows.model._base_manager.using(rows.db).filter(pk__in=keys)
        form.apply(chosen, user.get_username())
    return len(records)


def _forget(records: list[Any]) -> None:
    """Make every store forget what is about to change."""
    for store in stores.all():
        if store.recalls:
            for record in records:
                store.forget(record.key, record.scope)


def _why_left_alone(form: Action, rows: QuerySet[Any]) -> str:
    """Why nothing was done, as the record is now."""
    record = rows.first()
    because = form.refusal(record) if record else _("It has been deleted in the meantime.")
    because = because or _("It is in use now; look at it again in a while.")
    return _("The idempotency key was left unchanged. %(reason)s") % {"reason": because}


def _left_count(count: int) -> str:
    return ngettext(
        "%(count)d was left unchanged: it has changed since you looked, or is in use now.",
        "%(count)d were left unchanged: they have changed since you looked, or are in use now.",
        count,
    ) % {"count": count}


def _question(
    model_admin: ModelAdmin[Any], request: HttpRequest, form: Action, original: Any = None
) -> HttpResponse:
    """The page that says what follows, and asks; of one record, if there is an original."""
    refusals = [refusal for record in form.records if (refusal := form.refusal(record))]
    possible = len(refusals) < len(form.records)
    listed = [record for record in form.records if original or not form.refusal(record)]
    context = {
        **model_admin.admin_site.each_context(request),
        "opts": model_admin.opts,
        "media": model_admin.media,
        "title": form.title,
        "original": original,
        "records": [
            (record, STATES[state_of(record)], Moment(record.lease_expires_at, record.now))
            for record in listed
        ],
        "refusals": dict.fromkeys(refusals),
        "left_alone": 0 if original else len(refusals),
        "possible": possible,
        "consequences": form.consequences() if possible else [],
        "form": form,
        "errors": form.errors,
        "fieldset": next(iter(_fieldsets(model_admin, form))),
        "action_checkbox_name": helpers.ACTION_CHECKBOX_NAME,
    }
    return TemplateResponse(request, TEMPLATE, context)


def _fieldsets(model_admin: ModelAdmin[Any], form: Action) -> Any:
    """The form in the admin's own layout; its hidden fields are the template's business."""
    fields = [field.name for field in form.visible_fields()]
    layout: Any = helpers.AdminForm  # whose types ask for the form of a model
    return layout(form, [(None, {"fields": fields})], {}, (), model_admin=model_admin)


class Expire(Action):
    """End the replays; the record stays for its retention."""

    name = "expire"
    title = gettext_lazy("Expire idempotency keys")
    button = gettext_lazy("Expire")
    permission = "delete"
    for_many = True

    def refusal(self, record: Any) -> str:
        live = Moment(record.expires_at, record.now).ahead
        if record.status == Status.COMPLETED and live:
            return ""
        return _("Only completed keys that have not expired yet can be expired.")

    def consequences(self) -> list[str]:
        return [
            _("Their answers are no longer replayed."),
            _(
                "The next request with such a key is executed, even if it is a retry of one that "
                "was executed before."
            ),
        ]

    def apply(self, rows: QuerySet[Any], by: str) -> None:
        now, retention = DatabaseNow(), F("purge_at") - F("expires_at")
        rows.update(purge_at=Coalesce(now + retention, now), expires_at=now)

    def logged(self) -> str:
        return _("Expired; the next request with this key is executed.")

    def done(self, count: int) -> str:
        return ngettext(
            "%(count)d idempotency key was expired.",
            "%(count)d idempotency keys were expired.",
            count,
        ) % {"count": count}


class Delete(Action):
    """Remove the record and its steps."""

    name = "delete"
    title = gettext_lazy("Delete idempotency keys")
    permission = "delete"
    for_many = True
    flag = DELETION

    def refusal(self, record: Any) -> str:
        if state_of(record) != Status.IN_PROGRESS:
            return ""
        return _("A key in progress cannot be deleted before its lease has ended.")

    def consequences(self) -> list[str]:
        return [
            _("Neither they nor their steps are kept for the audit."),
            _(
                "The next request with such a key is executed from the beginning, even if it is a "
                "retry of one that was executed before."
            ),
        ]

    def apply(self, rows: QuerySet[Any], by: str) -> None:
        rows.delete()

    def logged(self) -> str:
        return _("Deleted; the next request with this key is executed.")

    def done(self, count: int) -> str:
        return ngettext(
            "%(count)d idempotency key was deleted.",
            "%(count)d idempotency keys were deleted.",
            count,
        ) % {"count": count}


ACTIONS: Final[tuple[type[Action], ...]] = (Expire, Delete, Complete, Release)
