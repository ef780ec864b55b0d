"""The errors of two writers of one object.

::

    IdempotencyError
    ├── PreconditionFailed         412  If-Match does not hold
    ├── PreconditionRequired       428  a change must say which version it is meant for
    ├── ConcurrentModification     409  the object was changed after it was loaded
    └── IllegalTransition          409  the object is in a state that this step does not start from
"""

from __future__ import annotations

from ...errors import IdempotencyError


class PreconditionFailed(
    IdempotencyError,
    status=412,
    slug="precondition-failed",
    title="Precondition failed",
    state="not-executed",
    default_detail=(
        "The resource has changed since you read it, so the request was not executed. Read the "
        "resource again and retry with its new ETag."
    ),
):
    """``If-Match`` does not hold; nothing was done."""


class PreconditionRequired(
    IdempotencyError,
    status=428,
    slug="precondition-required",
    title="Precondition required",
    state="not-executed",
    default_detail=(
        "A change of this resource requires its current version. Send If-Match with the ETag that "
        "you received with the resource."
    ),
):
    """The change must be conditional, and the request has no ``If-Match``."""


class ConcurrentModification(
    IdempotencyError,
    status=409,
    slug="state-conflict",
    title="Conflict with the state of the object",
    state="not-executed",
    retryable=True,
    default_detail=(
        "The object was changed by another process after it was loaded, so nothing was written. "
        "Load it again and repeat the change."
    ),
):
    """The object was changed or deleted by another process after it was loaded; nothing was
    written.
    """


class IllegalTransition(
    IdempotencyError,
    status=409,
    slug="state-conflict",
    title="Conflict with the state of the object",
    state="not-executed",
    default_detail=(
        "This transition does not start from the object's current state, so nothing was done."
    ),
):
    """The transition does not start from the object's state; the effect was not run."""


__all__ = [
    "ConcurrentModification",
    "IllegalTransition",
    "PreconditionFailed",
    "PreconditionRequired",
]
