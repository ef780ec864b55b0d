"""The errors of consumers and streams."""

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
