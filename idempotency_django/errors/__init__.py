"""The errors of idempotency_django, each with its one home, HTTP status and slug.

::

    IdempotencyError
    ├── KeyRefused                 400  the key itself is the problem
    │   ├── KeyMissing             400  the operation requires a key, but none was sent
    │   ├── KeyMalformed           400  not one string of 1-255 visible ASCII characters
    │   └── KeyGuessable           400  an anonymous caller's key that could be guessed
    ├── OperationInProgress        409  somebody else is executing this operation now
    ├── OperationHeld              409  interrupted, or failed too often; an operator must settle it
    ├── MessageParked              409  a message failed too often; an operator must settle it
    ├── UnknownEventType           422  the consumer has no handler for an event of this type
    ├── SignatureRefused           401  a webhook is not signed with a secret of its receiver
    ├── DeliveryMalformed          400  a signed webhook does not say which message it is
    ├── DeliveryTooLarge           413  a webhook's body is larger than its receiver takes
    ├── FingerprintMismatch        422  the key was used before, for a different request
    ├── ResponseNotStored          409  executed before, but its answer was not kept
    ├── AnswerNotAcceptable        406  executed before, but its answer is in another form
    ├── PreconditionFailed         412  ``If-Match`` or ``If-None-Match`` does not hold
    ├── PreconditionRequired       428  a change must say which version it is meant for
    ├── ConcurrentModification     409  the object was changed after it was loaded
    ├── IllegalTransition          409  the object is in a state that this step does not start from
    ├── StoreUnavailable           503  the store cannot be reached; nothing was executed
    ├── StepsChanged               500  the stored steps are not the steps of the code
    └── ClaimLost                  500  the claim was lost during execution

:exc:`StepFailed` is not one of them: it is raised *to* a handler, as an error of one of its steps.
Nor are :exc:`StreamFenced` and :exc:`AlreadyProcessed`, which end the loop that reads a stream.

The slug names the page of the documentation that explains the problem; the status is the
default of the ``STATUS_CODES`` setting. A wrong configuration is Django's own
:exc:`django.core.exceptions.ImproperlyConfigured`.
"""

from __future__ import annotations

from .base import IdempotencyError, all_errors
from .messaging import (
    AlreadyProcessed,
    DeliveryMalformed,
    DeliveryTooLarge,
    MessageParked,
    SignatureRefused,
    StreamFenced,
    UnknownEventType,
)
from .operations import (
    AnswerNotAcceptable,
    ClaimLost,
    FingerprintMismatch,
    KeyGuessable,
    KeyMalformed,
    KeyMissing,
    KeyRefused,
    OperationHeld,
    OperationInProgress,
    ResponseNotStored,
    StepFailed,
    StepsChanged,
    StoreUnavailable,
)
from .writes import (
    ConcurrentModification,
    IllegalTransition,
    PreconditionFailed,
    PreconditionRequired,
)

__all__ = [
    "AlreadyProcessed",
    "AnswerNotAcceptable",
    "ClaimLost",
    "ConcurrentModification",
    "DeliveryMalformed",
    "DeliveryTooLarge",
    "FingerprintMismatch",
    "IdempotencyError",
    "IllegalTransition",
    "KeyGuessable",
    "KeyMalformed",
    "KeyMissing",
    "KeyRefused",
    "MessageParked",
    "OperationHeld",
    "OperationInProgress",
    "PreconditionFailed",
    "PreconditionRequired",
    "ResponseNotStored",
    "SignatureRefused",
    "StepFailed",
    "StepsChanged",
    "StoreUnavailable",
    "StreamFenced",
    "UnknownEventType",
    "all_errors",
]

for _name in __all__:
    # Tracebacks, pickles and the documentation name the place to import it from.
    globals()[_name].__module__ = __name__
