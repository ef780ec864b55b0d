"""The state of a record as people see it: its status, and what it means that a lease has ended."""

from __future__ import annotations

from typing import Any, Final

from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from ..models import GRACE, DatabaseNow, IdempotencyKeyQuerySet
from ..records import Status

INTERRUPTED: Final = "interrupted"
HELD: Final = "held"

UNFINISHED: Final = frozenset({Status.IN_PROGRESS.value, INTERRUPTED, HELD})

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
    """The rows in that state."""
    if state not in UNFINISHED:
        return rows.filter(status=state)
    return rows.filter(with_lease(state) | without_lease(state), status=Status.IN_PROGRESS)


def with_lease(state: str) -> Q:
    """Which rows in progress are in an unfinished state; they are found by the index on leases."""
    if state == Status.IN_PROGRESS:
        return Q(lease_expires_at__gt=DatabaseNow())
    return Q(lease_expires_at__lte=DatabaseNow(), hold=state == HELD)


def without_lease(state: str) -> Q:
    """The same, of rows without a lease, which are in no index that leads to them."""
    no_lease, oldest = Q(lease_expires_at=None), DatabaseNow() - GRACE
    if state == Status.IN_PROGRESS:
        return no_lease & Q(created_at__gt=oldest)
    return no_lease & Q(created_at__lte=oldest, hold=state == HELD)
