"""The errors of messages: of consumers, streams and webhooks."""

from __future__ import annotations

from .base import IdempotencyError


class MessageParked(IdempotencyError):
    """A message failed as often as its consumer allows, and is held until an operator settles it.

    Its ``__cause__`` is the handler's error, if the handler ran in this call. Keep the message: a
    transport moves it to a dead-letter queue. Once an operator has released it in the admin, the
    next delivery runs the handler again.
    """

    status = 409
    slug = "message-parked"
    title = "The message failed too often and is parked"
    default_detail = (
        "The handler of this message failed as often as its consumer allows, so the message is "
        "parked. It is not handled again until an operator releases it. Keep the message, for "
        "example in a dead-letter queue, and deliver it again after that."
    )


class UnknownEventType(IdempotencyError):
    """The consumer has no handler for an event of this type; nothing was claimed or executed."""

    status = 422
    slug = "unknown-event-type"
    title = "The consumer has no handler for events of this type"
    default_detail = (
        "The consumer has no handler for an event of this type. Nothing was executed, and nothing "
        "is recorded: register a handler, and deliver the event again."
    )


class StreamFenced(Exception):
    """Somebody else has claimed the stream since; nothing of this call is committed.

    Like :exc:`AlreadyProcessed`, it is for the loop that reads a stream, and no answer to a
    request, so it has no status and no slug.
    """


class AlreadyProcessed(Exception):
    """The effects of this offset of the stream were committed before; nothing was executed."""


class SignatureRefused(IdempotencyError):
    """A webhook was not signed with one of the receiver's secrets, or not lately."""

    status = 401
    slug = "signature-refused"
    title = "The delivery is not signed as it has to be"
    default_detail = (
        "The delivery was not signed with a secret of this receiver, or its timestamp is too far "
        "from now. Nothing was stored."
    )


class DeliveryMalformed(IdempotencyError):
    """A webhook does not say which message it is, or its body could not be read."""

    status = 400
    slug = "delivery-malformed"
    title = "The delivery cannot be understood"
    default_detail = (
        "The delivery has a valid signature, but its id or its type is missing or cannot be kept. "
        "Nothing was stored."
    )


class DeliveryTooLarge(IdempotencyError):
    """The body of a webhook is larger than its receiver takes; it was not read."""

    status = 413
    slug = "delivery-too-large"
    title = "The delivery is too large"
    default_detail = (
        "The body of the delivery is larger than this receiver takes. Nothing was stored."
    )
