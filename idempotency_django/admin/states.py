"""The state of a record as people see it: its status, and what it means that a lease has ended."""

from __future__ import annotations

from typing import Any, Final

from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from ..models import GRACE, DatabaseNow, IdempotencyKeyQuerySet
from ..records import Status

INTERRUPTED: Final = "interrupted"
HELD: Final = "held"

STATES: Final[dict[str, Any]] = {
    Status.IN_PROGRESS.value: _("in progress"),
    INTERRUPTED: _("interrupted"),
    HELD: _("held"),
    Status.COMPLETED.value: _("completed"),
    Status.FAILED.value: _("failed"),
}
"""The name of each state. Every record is in one of them."""


def state_of(record: Any) -> str:
    """The state of a record as the admin's queryset reads it: one of ``STATES``."""
    ends = record.lease_expires_at or record.created_at + GRACE
    if record.status != Status.IN_PROGRESS or ends > record.now:
        return str(record.status)
    return HELD if record.hold else INTERRUPTED


def in_state(rows: IdempotencyKeyQuerySet, state: str) -> IdempotencyKeyQuerySet:
    """The rows in that state. Those that have no lease are in no index, like what is done with."""
    if state == HELD:
        return rows.held()
    if state == INTERRUPTED:
        return rows.interrupted().filter(hold=False)
    if state == Status.IN_PROGRESS:
        young = Q(lease_expires_at=None, created_at__gt=DatabaseNow() - GRACE)
        return rows.filter(young | Q(lease_expires_at__gt=DatabaseNow()), status=state)
    return rows.filter(status=state)
