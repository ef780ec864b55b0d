"""The two ways to settle an interrupted record, each as the form that asks what it takes."""

from __future__ import annotations

import json
import secrets
from typing import Any, ClassVar

from django import forms
from django.contrib.admin.widgets import AdminTextareaWidget
from django.db.models import Q, QuerySet
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ..models import DatabaseNow
from ..records import Status
from .answer_form import AnswerForm
from .states import HELD, INTERRUPTED, STATES, state_of
from .timeline import Event


class Settlement(forms.Form):
    """What an operator enters to settle a record; the fields that both ways share.

    Attributes:
        name: of its page.
        title: what is going to be done.
        done: what has been done.
    """

    name: ClassVar[str]
    title: ClassVar[Any]
    done: ClassVar[Any]

    # The attempt that the operator has looked at: the next one may have come further.
    attempt = forms.IntegerField(widget=forms.HiddenInput)
    reason = forms.CharField(
        label=gettext_lazy("Reason"),
        help_text=gettext_lazy("What you found out, for people who ask later. It is logged."),
        max_length=1000,
        widget=AdminTextareaWidget(attrs={"rows": 3}),
    )

    def consequences(self, record: Any, steps: int) -> list[str]:
        """What happens then to the record, which has that many steps; for the operator."""
        raise NotImplementedError

    def eligible(self, rows: Any) -> QuerySet[Any]:
        """Those of the rows that are interrupted, still at the attempt that was looked at."""
        interrupted: QuerySet[Any] = rows.interrupted().filter(attempt=self.cleaned_data["attempt"])
        return interrupted

    def refusal(self, record: Any) -> str:
        """Why the record cannot be settled in this way; empty where it can."""
        state = state_of(record)
        if state not in (INTERRUPTED, HELD):
            values = {"state": STATES[state]}
            return _("Only an interrupted record can be settled; this one is %(state)s.") % values
        if self.is_bound and self.cleaned_data.get("attempt", record.attempt) != record.attempt:
            values = {"attempt": record.attempt}
            return (
                _("Attempt %(attempt)d has begun since you looked, and was interrupted too.")
                % values
            )
        return ""

    def changes(self, by: str) -> dict[str, Any]:
        """The columns of the settled row. An owner that is still alive no longer owns it."""
        return {
            "owner_token": secrets.token_hex(16),
            "lease_expires_at": None,
            "completed_at": DatabaseNow(),
        }

    def logged(self) -> str:
        """The log entry."""
        raise NotImplementedError


class Completion(AnswerForm, Settlement):
    """Complete by hand: the operation has been done, and this is its answer."""

    name = "complete"
    title = gettext_lazy("Complete by hand")
    done = gettext_lazy("The idempotency key was completed by hand.")

    field_order = ("attempt", "status", "content_type", "body", "reason")

    def consequences(self, record: Any, steps: int) -> list[str]:
        until = Event("", record.expires_at, record.now)
        return [
            _("Every retry gets this answer, and nothing is executed.")
            if record.expires_at is None
            else _(
                "Until %(time)s (%(age)s), every retry gets this answer and nothing is executed."
            )
            % {"time": until.exactly, "age": until.age},
            _(
                "What the interrupted attempt has done stays done, and what it has not done stays "
                "undone. Find out which, so that the answer is true."
            ),
            _(
                "If the original process is merely late, it can no longer complete; its client "
                "gets this answer."
            ),
        ]

    def eligible(self, rows: Any) -> QuerySet[Any]:
        live = Q(expires_at=None) | Q(expires_at__gt=DatabaseNow())
        return super().eligible(rows).filter(live)

    def refusal(self, record: Any) -> str:
        because = super().refusal(record)
        if because or record.expires_at is None or record.expires_at > record.now:
            return because
        ended = Event("", record.expires_at, record.now)
        return _(
            "Its time to live ended at %(time)s (%(age)s), so no retry would get the answer: the "
            "operation would be executed again. Leave it as it is, release it or delete it."
        ) % {"time": ended.exactly, "age": ended.age}

    def changes(self, by: str) -> dict[str, Any]:
        return {
            **super().changes(by),
            "status": Status.COMPLETED,
            "response_status": self.cleaned_data["status"],
            "response_headers": json.dumps(self.headers),
            "response_body": self.content,
            "error": "",
        }

    def logged(self) -> str:
        return _(
            "Completed by hand with status %(status)d and %(size)d bytes of body: %(reason)s"
        ) % {
            **self.cleaned_data,
            "size": len(self.content),
        }


class Release(Settlement):
    """Release for retry: the operation is to be executed again."""

    name = "release"
    title = gettext_lazy("Release for retry")
    done = gettext_lazy("The idempotency key was released: the next retry is executed.")

    def consequences(self, record: Any, steps: int) -> list[str]:
        return [
            _("The next retry executes the operation again. Without a retry, nothing happens."),
            _resumption(record, steps),
            _(
                "Whatever else the interrupted attempt has done is done a second time, unless the "
                "other side recognises it by its derived key. Find that out first."
            ),
            _("If the original process is merely late, it can no longer complete."),
        ]

    def changes(self, by: str) -> dict[str, Any]:
        values = {"user": by, "reason": self.cleaned_data["reason"]}
        return {
            **super().changes(by),
            "status": Status.FAILED,
            "pinned": True,  # what the attempt has done elsewhere was done for this request
            "error": _("Released by %(user)s: %(reason)s") % values,
        }

    def logged(self) -> str:
        return _("Released for retry: %(reason)s") % self.cleaned_data


def _resumption(record: Any, steps: int) -> str:
    """Where the next attempt begins."""
    ends = Event("", record.expires_at, record.now)
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
