"""The errors of messaging: of consumers, webhooks and streams.

::

    IdempotencyError
    ├── DeadLettered               409  a message failed too often; an operator must settle it
    ├── UnknownEventType           422  the consumer has no handler for an event of this type
    ├── SignatureRefused           401  a webhook is not signed with a secret of its receiver
    └── DeliveryMalformed          400  a signed webhook does not say which message it is

:exc:`StreamFenced` and :exc:`AlreadyProcessed` are not among them: they end the loop that reads a
stream, and have neither a status nor a slug.
"""

from __future__ import annotations

from ...errors import IdempotencyError


class DeadLettered(
    IdempotencyError,
    status=409,
    slug="held",
    title="Operation held for an operator",
    token="held",
    default_detail=(
        "The handler of this message has used up its attempts, so the message is a dead letter. "
        "It is not handled until an operator releases it. Keep it, for example in a dead-letter "
        "queue, and deliver it again after that."
    ),
):
    """A message failed as often as its consumer allows, and is held until an operator settles it.

    Its ``__cause__`` is the handler's error, if the handler ran in this call. Keep the message: a
    transport moves it to a dead-letter queue. Once an operator has released it in the admin, the
    next delivery runs the handler again.
    """


class UnknownEventType(
    IdempotencyError,
    status=422,
    slug="unknown-event-type",
    title="Unknown event type",
    state="not-executed",
    safe_new_key=True,
    default_detail=(
        "The consumer has no handler for this event type. Nothing was executed or recorded. "
        "Register a handler and deliver the event again."
    ),
):
    """The consumer has no handler for an event of this type; nothing was claimed or executed."""


class SignatureRefused(
    IdempotencyError,
    status=401,
    slug="delivery-refused",
    title="Webhook delivery refused",
    state="not-executed",
    safe_new_key=True,
    default_detail=(
        "The signature does not match a secret of this receiver, or the timestamp is too far from "
        "the current time. Nothing was stored."
    ),
):
    """A webhook was not signed with one of the receiver's secrets, or not lately."""


class DeliveryMalformed(
    IdempotencyError,
    status=400,
    slug="delivery-refused",
    title="Webhook delivery refused",
    state="not-executed",
    safe_new_key=True,
    default_detail=(
        "The delivery has a valid signature, but its id or type is missing or invalid. Nothing "
        "was stored."
    ),
):
    """A webhook does not say which message it is, or of which type."""


class StreamFenced(Exception):
    """Another process has claimed the stream; nothing of this call is committed.

    Like :exc:`AlreadyProcessed`, it is for the loop that reads a stream, and no response to a
    request, so it has no status and no slug.
    """


class AlreadyProcessed(Exception):
    """The effects of this offset of the stream were committed before; nothing was executed."""


__all__ = [
    "AlreadyProcessed",
    "DeadLettered",
    "DeliveryMalformed",
    "SignatureRefused",
    "StreamFenced",
    "UnknownEventType",
]
