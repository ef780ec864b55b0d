"""The errors of idempotency_django, each with its HTTP status and its problem type (RFC 9457).

::

    IdempotencyError
    ├── KeyRefused                 400  the key itself is the problem
    │   ├── KeyMissing             400  the operation requires a key, but none was sent
    │   ├── KeyMalformed           400  not one string of 1-255 visible ASCII characters
    │   ├── KeyGuessable           400  an anonymous caller's key that could be guessed
    │   └── KeyUnsupported         400  a key for a view that cannot be protected
    ├── OperationInProgress        409  another process is executing this operation
    ├── OperationHeld              409  interrupted, or failed too often; an operator must settle it
    ├── FingerprintMismatch        422  the key was used before, for a different request
    ├── ResponseNotStored          409  executed before, but its response was not kept
    ├── KeyExpired                 409  executed before; its record has expired
    ├── StoreUnavailable           503  the store cannot be reached
    ├── StepsChanged               500  a stored step was not called
    └── ClaimLost                  500  the claim was lost during execution

:mod:`idempotency_django.contrib.messaging.errors` and
:mod:`idempotency_django.contrib.concurrency.errors` have those of messages and of concurrent
changes.

The slug names the type of the problem, and the page of the documentation that explains it; errors
that need the same advice share one. The status is the default of the ``STATUS_CODES`` setting. A
wrong configuration is Django's own :exc:`django.core.exceptions.ImproperlyConfigured`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Final, Literal

State = Literal["not-executed", "in-progress", "executed", "unknown"]
"""What became of an operation, as far as it is known."""


class IdempotencyError(Exception):
    """The base of all errors that an operation can end in.

    ``str(error)`` is written for the person who reads it: what was wrong and what to do.

    Args:
        detail: what was wrong with this request; by default the class's own text.
        retry_after: seconds after which a retry makes sense, or ``None`` if none does.

    Attributes:
        token: the value of the response's ``Idempotency-Status``.
        foreign: whether it is about another operation than the request's: an ``idempotent_call``,
            or what a hook did after the commit. An adapter treats it like any other exception of
            the view.
        state: what became of the operation with this key, as far as it is known.
        retryable: whether the same request with the same key may succeed later, without a person's
            help.
        safe_new_key: whether the operation can be repeated with a new key. It is true only if no
            attempt at it can have begun an effect outside the database.
    """

    status: ClassVar[int] = 500
    slug: ClassVar[str] = "error"
    title: ClassVar[str] = "Idempotency error"
    token: ClassVar[str] = "failed"  # noqa: S105  # no secret
    default_detail: ClassVar[str] = "The idempotency layer could not process the request."
    foreign: bool = False
    state: State = "unknown"
    retryable: bool = False
    safe_new_key: bool = False

    def __init_subclass__(cls, **described: Any) -> None:
        """A kind of error is described by the arguments of its class."""
        super().__init_subclass__()
        for name, value in described.items():
            setattr(cls, name, value)

    def __init__(self, detail: str = "", *, retry_after: int | None = None) -> None:
        self.detail = detail or self.default_detail
        self.retry_after = retry_after
        super().__init__(self.detail)


def all_errors(base: type[IdempotencyError] = IdempotencyError) -> Iterator[type[IdempotencyError]]:
    """Every error that is raised: the leaves of the tree below ``base``."""
    for error in base.__subclasses__():
        if error.__subclasses__():
            yield from all_errors(error)
        else:
            yield error


class KeyRefused(
    IdempotencyError,
    status=400,
    slug="key-refused",
    title="Invalid idempotency key",
    token="refused",
    state="not-executed",
    safe_new_key=True,
    default_detail="The idempotency key cannot be used for this operation.",
):
    """The key cannot be used; nothing was looked up and nothing was executed."""


class KeyMissing(
    KeyRefused,
    slug="key-missing",
    title="Idempotency key required",
    default_detail=(
        "This operation requires an idempotency key. Send a new, unique key with each new "
        "operation and the same key with each retry of it."
    ),
):
    """The operation requires a key and the request carries none."""


class KeyMalformed(
    KeyRefused,
    slug="key-malformed",
    title="Malformed or guessable idempotency key",
    default_detail="The idempotency key must be one string of 1-255 visible ASCII characters.",
):
    """The key is not 1-255 visible ASCII characters, or not in the policy's format."""


class KeyGuessable(
    KeyRefused,
    slug="key-malformed",
    title="Malformed or guessable idempotency key",
    # The caller may have been logged in for an earlier request with the key.
    state="unknown",
    safe_new_key=False,
    default_detail=(
        "Without authentication, only the idempotency key protects the response, so the key must "
        "be unguessable: a random UUID, a ULID, or at least 22 URL-safe characters."
    ),
):
    """Unauthenticated callers share a scope, so their keys must be unguessable."""


class KeyUnsupported(
    KeyRefused,
    slug="key-unsupported",
    title="Idempotency key not supported",
    default_detail=(
        "This operation takes no idempotency key, so a retry of it would be executed again. "
        "Nothing was executed. Send the request without the key if you never retry it."
    ),
):
    """The view cannot be protected, so it takes no keys."""


class OperationInProgress(
    IdempotencyError,
    status=409,
    slug="in-progress",
    title="Operation in progress",
    token="in-progress",
    state="in-progress",
    retryable=True,
    default_detail=(
        "A request with this idempotency key is being processed. Retry later with the same key to "
        "get its response."
    ),
):
    """Another process is executing the operation.

    Attributes:
        remaining: seconds until the owner's lease ends, if the owner does not renew it. A retry
            before that finds out no more, unless the owner has finished. It is ``None`` if a
            transaction holds the claim, or if it is unknown.
        busy: whether something else has locked the whole database, as on SQLite: then this
            operation may not be in progress at all.
    """

    remaining: float | None = None
    busy: bool = False


class OperationHeld(
    IdempotencyError,
    status=409,
    slug="held",
    title="Operation held for an operator",
    token="held",
    default_detail=(
        "An earlier attempt at this operation was interrupted and its effects are unknown, or the "
        "operation has used up its attempts. It is not executed again until an operator completes "
        "or releases it."
    ),
):
    """An operator must say what becomes of the operation.

    An attempt was interrupted, what it did is unknown, and the policy says to ask a person; or as
    many attempts as its caller allows have failed or were interrupted.
    """


class FingerprintMismatch(
    IdempotencyError,
    status=422,
    slug="mismatch",
    title="Idempotency key used for a different request",
    token="mismatch",
    state="not-executed",
    default_detail=(
        "This idempotency key was already used with a different request. Retry with the "
        "original request, or send the new request with a new key."
    ),
):
    """The key was used before for a request that asked for something else."""


class ResponseNotStored(
    IdempotencyError,
    status=409,
    slug="response-not-stored",
    title="Response not stored",
    token="not-replayed",
    state="executed",
    default_detail=(
        "The operation with this idempotency key was executed and is not executed again. Its "
        "response was not stored, because it was streamed, too large, or a page of HTML. "
        "Look up the result instead of retrying."
    ),
):
    """The operation was executed before, but its response was not kept.

    It was streamed, too large, or a page of HTML.
    """


class KeyExpired(
    IdempotencyError,
    status=409,
    slug="key-expired",
    title="Key expired",
    token="expired",
    state="executed",
    default_detail=(
        "The operation with this idempotency key was executed and is not executed again. Its "
        "response has expired. Look up the result instead of retrying."
    ),
):
    """The operation was executed before; its record has expired, and is still there."""


UNCONFIRMED_MESSAGE: Final = (
    "The database did not confirm the commit, so the result is unknown. Retry later with the same "
    "key: the retry gets the response, or executes the operation."
)

REFUSED_MESSAGE: Final = (
    "The database could not commit because of a conflict with another transaction, and has "
    "rolled back. Retry later with the same key."
)
BUSY_MESSAGE: Final = (
    "Another transaction has locked the database, so nothing was executed. Retry later with the "
    "same key."
)
ROLLED_BACK_MESSAGE: Final = (
    "The connection to the database was lost before the commit, so nothing was committed. Retry "
    "later with the same key."
)


class StoreUnavailable(
    IdempotencyError,
    status=503,
    slug="store-unavailable",
    title="Idempotency store unavailable",
    retryable=True,
    default_detail=(
        "The idempotency store cannot be reached, so nothing was executed. Retry later with "
        "the same key."
    ),
):
    """The store cannot be reached. The text says what is known: by default, nothing was executed.

    Attributes:
        rolled_back: whether the database has certainly rolled the attempt's transaction back.
    """

    rolled_back = False


class StepsChanged(
    IdempotencyError,
    slug="steps-changed",
    title="Steps of the operation changed",
    default_detail=(
        "The attempt ended without a step that an earlier attempt has stored. The effects of both "
        "attempts stay. Restore the step, and retry with the same key."
    ),
):
    """The attempt ended without a step that an earlier attempt has stored."""


class ClaimLost(
    IdempotencyError,
    slug="claim-lost",
    title="Claim lost",
    retryable=True,
    default_detail=(
        "The claim on this idempotency key was lost during execution, so the attempt could not "
        "commit. Check whether its record was deleted or changed by hand, and retry with the same "
        "key."
    ),
):
    """The claim was lost while its owner executed: taken over after its lease, or deleted."""


__all__ = [
    "ClaimLost",
    "FingerprintMismatch",
    "IdempotencyError",
    "KeyExpired",
    "KeyGuessable",
    "KeyMalformed",
    "KeyMissing",
    "KeyRefused",
    "KeyUnsupported",
    "OperationHeld",
    "OperationInProgress",
    "ResponseNotStored",
    "StepsChanged",
    "StoreUnavailable",
    "all_errors",
]
