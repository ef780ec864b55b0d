"""Two ways to end replays: the record is kept for the audit, or it is deleted."""

from __future__ import annotations

from typing import Any

from django.contrib.admin.models import DELETION
from django.db.models import F, QuerySet
from django.db.models.functions import Coalesce
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ...models import DatabaseNow
from ...records import Status
from ...tracing.moments import Moment
from ...tracing.states import state_of
from .base import Action


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
