"""The errors of operations and their keys."""

from __future__ import annotations

from typing import Final

from .base import IdempotencyError


class KeyRefused(IdempotencyError):
    """The key cannot be used; nothing was looked up and nothing was executed."""

    status = 400
    slug = "key-refused"
    title = "The idempotency key cannot be used"
    default_detail = "The idempotency key cannot be used for this operation."


class KeyMissing(KeyRefused):
    """The operation requires a key and the request carries none."""

    slug = "key-missing"
    title = "An idempotency key is required"
    default_detail = (
        "This operation requires an idempotency key. Send a new, unique key with each new "
        "operation and the same key with each retry of it."
    )


class KeyMalformed(KeyRefused):
    """The key is not 1-255 visible ASCII characters, or not in the policy's format."""

    slug = "key-malformed"
    title = "The idempotency key is malformed"
    default_detail = "The idempotency key must be one string of 1-255 visible ASCII characters."


class KeyGuessable(KeyRefused):
    """Callers who are not told apart share a scope, so their keys must be unguessable."""

    slug = "key-guessable"
    title = "The idempotency key could be guessed"
    default_detail = (
        "Without authentication, only the idempotency key protects the answer, so the key must "
        "be unguessable: a random UUID, a ULID, or at least 22 URL-safe characters."
    )


class OperationInProgress(IdempotencyError):
    """Somebody else is executing the operation now.

    Attributes:
        remaining: seconds until the owner's lease ends, if the owner does not renew it; ``None``:
            unknown, or a transaction holds the claim. A retry before that finds out no more, unless
            the owner has finished.
        busy: whether something else has locked the whole database, as on SQLite: then this
            operation may not be in progress at all.
    """

    status = 409
    slug = "in-progress"
    title = "The operation is still in progress"
    default_detail = (
        "A request with this idempotency key is being processed. Retry later with the same key "
        "to receive its answer."
    )
    remaining: float | None = None
    busy: bool = False


class OperationHeld(IdempotencyError):
    """An operator must say what becomes of the operation.

    An attempt was interrupted, what it did is unknown, and the policy says to ask a person; or as
    many attempts as its caller allows have failed or were interrupted.
    """

    status = 409
    slug = "held"
    title = "The operation is held for an operator"
    default_detail = (
        "An earlier attempt at this operation was interrupted, and how much of it was done is "
        "unknown; or it has failed as often as is allowed. It is not repeated until an operator "
        "settles it."
    )


class FingerprintMismatch(IdempotencyError):
    """The key was used before for a request that asked for something else."""

    status = 422
    slug = "mismatch"
    title = "The idempotency key was used for a different request"
    default_detail = (
        "This idempotency key was already used with a different request. Retry with the "
        "original request, or send the new request with a new key."
    )


class ResponseNotStored(IdempotencyError):
    """The operation was executed before, but its answer was not kept.

    It was streamed, too large, or a page that contains its visitor's CSRF token, or a CSP nonce.
    """

    status = 409
    slug = "response-not-stored"
    title = "The operation was executed, but its answer was not kept"
    default_detail = (
        "The operation with this idempotency key was executed and is not executed again. Its "
        "answer was not kept, because it was streamed, too large, or a page made for one "
        "visitor. Look the result up instead of retrying."
    )


class AnswerNotAcceptable(IdempotencyError):
    """The operation was executed before, and ``Accept`` does not admit the form of its answer."""

    status = 406
    slug = "not-acceptable"
    title = "The stored answer is in a form that the request does not accept"
    default_detail = (
        "The operation with this idempotency key was executed and is not executed again. Its "
        "answer was stored in a media type that this request's Accept header does not admit. "
        "Retry with the Accept header of the first request."
    )


UNCONFIRMED_MESSAGE: Final = (
    "The database did not confirm the commit of the operation, so nobody knows whether it was "
    "committed. Retry later with the same key: the retry gets the answer, or executes the "
    "operation."
)

BUSY_MESSAGE: Final = (
    "The database is busy: other work has locked it, so nothing was executed. Retry later with the "
    "same key."
)
ROLLED_BACK_MESSAGE: Final = (
    "The connection to the database was lost before the operation was committed, so nothing of it "
    "is committed. Retry later with the same key."
)


class StoreUnavailable(IdempotencyError):
    """The store cannot be reached; nothing was executed.

    Attributes:
        rolled_back: whether a transaction that was to be committed is known to be rolled back.
    """

    status = 503
    slug = "store-unavailable"
    rolled_back = False
    title = "The operation cannot be made safe to retry right now"
    default_detail = (
        "The idempotency store cannot be reached, so nothing was executed. Retry later with "
        "the same key."
    )


class StepsChanged(IdempotencyError):
    """An earlier attempt stored steps that the code no longer has, or has in another order."""

    slug = "steps-changed"
    title = "The steps of the operation have changed"
    default_detail = (
        "An earlier attempt at this operation stored steps that the program no longer has in "
        "this order, so the operation cannot be resumed. What the earlier attempt and this one "
        "have done so far stays done. An operator must settle the operation."
    )


class StepFailed(Exception):
    """A step failed in an earlier attempt, whose handler caught the error and went on.

    It is raised if the error's class was not passed to
    :meth:`~idempotency_django.engine.context.ExecutionContext.expect`.

    Args:
        step: the step's name.
        attempt: the attempt that called it.
        error: the name of the error's class.
        text: the error's text.
    """

    def __init__(self, step: str, attempt: int, error: str, text: str) -> None:
        self.step = step
        self.attempt = attempt
        super().__init__(
            f"The step {step!r} failed in attempt {attempt} with {error}: {text}. That attempt "
            "went on without it, so the step is not called again. Catch StepFailed, or call "
            f"expect({error}) before the steps to get the original error."
        )


class ClaimLost(IdempotencyError):
    """The claim was lost while its owner executed: taken over after its lease, or deleted."""

    slug = "claim-lost"
    title = "The claim on the operation was lost"
    default_detail = (
        "The claim on this idempotency key was lost during execution, so the attempt could not "
        "commit. Was its record deleted or changed by hand? Retry with the same key."
    )
