"""The errors of conditional writes."""

from __future__ import annotations

from .base import IdempotencyError


class PreconditionFailed(IdempotencyError):
    """A conditional header of the request does not hold; nothing was done."""

    status = 412
    slug = "precondition-failed"
    title = "The resource is not in the state that the request was made for"
    default_detail = (
        "The resource was changed since you read it, or it exists already, so the request was not "
        "executed. Read the resource again, decide again, and send its new ETag."
    )


class PreconditionRequired(IdempotencyError):
    """The change must be conditional, and the request has no ``If-Match``."""

    status = 428
    slug = "precondition-required"
    title = "The request must be conditional"
    default_detail = (
        "This resource is changed only on condition that it is still what you have read. Send "
        "If-Match with the ETag that you received with it."
    )


class ConcurrentModification(IdempotencyError):
    """The object was changed or deleted by somebody else after it was loaded; nothing was written.

    It can be caught within a transaction, which stays usable.
    """

    status = 409
    slug = "concurrent-modification"
    title = "Somebody else changed the object in the meantime"
    default_detail = (
        "The object was changed by somebody else after it was loaded, so nothing was written. "
        "Load it again and decide again."
    )


class IllegalTransition(IdempotencyError):
    """The object's state is none that the transition starts from; the effect was not run."""

    status = 409
    slug = "illegal-transition"
    title = "The object is in a state that does not allow this"
    default_detail = (
        "The object is in a state that this transition does not start from, so nothing was done."
    )
