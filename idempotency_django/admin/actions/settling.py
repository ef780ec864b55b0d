"""Two ways to settle an interrupted record: completing it by hand, or releasing it for a retry."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib.admin.widgets import AdminTextareaWidget
from django.db.models import QuerySet
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ...models import NO_OWNER, DatabaseNow, IdempotencyStep
from ...records import Payload, Status
from ...stores.codec import encode
from ...tracing.moments import Moment
from ...tracing.states import HELD, INTERRUPTED, STATES, state_of
from .answer_form import AnswerForm
from .base import Action


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
