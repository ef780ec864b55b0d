"""The take-over of a key whose attempt failed, was interrupted, or has outlived its answer."""

from __future__ import annotations

from typing import Any

from django.db import connections
from django.db.models import BooleanField, ExpressionWrapper, Q, QuerySet
from django.db.models.functions import Coalesce

from ...models import (
    DatabaseNow,
    IdempotencyKey,
    IdempotencyKeyQuerySet,
    IdempotencyStep,
    lease_is_over,
)
from ...records import Claim, Operation, Record, Status, new_token
from .dialects import Dialect, plain
from .rows import in_progress, lifetime


def take_over(dialect: Dialect, operation: Operation, before: Record) -> Claim | Record:
    """Claim a key that has a record, if it is free, unless another contender is faster.

    Args:
        dialect: of the database that has the record.
        operation: what wants the key.
        before: the record, as it was seen before anything was locked.
    """
    mine = IdempotencyKeyQuerySet(IdempotencyKey, using=dialect.using).filter(pk=before.record_id)
    row = _locked(dialect, operation, mine)
    if row is None:
        return in_progress(operation)
    attempt, token, status, same, expired, interrupted, hold, pinned = row
    if status == Status.IN_PROGRESS and not (interrupted and same and not hold):
        return before if before.status is Status.IN_PROGRESS else in_progress(operation)
    if status == Status.COMPLETED and not expired:
        return in_progress(operation)  # since we looked; the next retry is answered
    steps = IdempotencyStep.objects.using(dialect.using).filter(record=before.record_id)
    if status == Status.IN_PROGRESS:
        pinned = True  # nobody knows what its owner has done
    elif expired or status == Status.COMPLETED:
        pinned = False
        steps.delete()
    elif not same and (pinned or steps.exists()):
        failed_for_another = (
            before.status is Status.FAILED and before.fingerprint != operation.fingerprint
        )
        return before if failed_for_another else in_progress(operation)  # since we looked, likewise
    late = status == Status.IN_PROGRESS
    resumed = late or (same and not expired)
    token = new_token(token if resumed else "")
    claim = Claim(operation, attempt + 1, token, before.record_id, interrupted=late)
    mine.update(**_fresh(claim), pinned=pinned)
    return claim


def _locked(
    dialect: Dialect, operation: Operation, rows: QuerySet[Any, Any]
) -> tuple[Any, ...] | None:
    """What a take-over depends on; the row is locked from here on."""
    skip = connections[dialect.using].features.has_select_for_update_skip_locked
    described: QuerySet[Any, Any] = rows.annotate(
        same=_is(fingerprint=operation.fingerprint),
        expired=_is(expires_at__lte=DatabaseNow()),
        interrupted=_is(lease_is_over()),
    )
    free: Any = dialect.lockable(described, operation).select_for_update(skip_locked=skip)
    row: tuple[Any, ...] | None = free.values_list(
        "attempt", "owner_token", "status", "same", "expired", "interrupted", "hold", "pinned"
    ).first()
    return row


def _is(*conditions: Q, **condition: Any) -> ExpressionWrapper[Any]:
    """Whether a row fulfils the condition; what is unknown does not."""
    wanted = Q(*conditions, **condition)
    return ExpressionWrapper(Coalesce(wanted, False), output_field=BooleanField())


def _fresh(claim: Claim) -> dict[str, Any]:
    """The columns of a row that starts over."""
    operation = claim.operation
    lease = operation.lease
    return {
        "operation": plain(operation.name, 255),
        "fingerprint": operation.fingerprint,
        "status": Status.IN_PROGRESS,
        "attempt": claim.attempt,
        "owner_token": claim.token,
        "lease_expires_at": None if lease is None else DatabaseNow() + lease,
        "hold": operation.hold,
        "response_status": None,
        "response_headers": "[]",
        "response_body": None,
        "error": "",
        "created_at": DatabaseNow(),
        "completed_at": None,
        "replay_count": 0,
        "last_replayed_at": None,
        "principal": plain(operation.principal, 255),
        "method": plain(operation.method, 16),
        "path": plain(operation.path, 2048),
        "caused_by": operation.caused_by,
        **lifetime(operation),
    }
