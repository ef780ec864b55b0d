"""What a message of the inbox is to its handler: an event, and an operation with a record."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from typing import Any, Final

from django.utils.datastructures import CaseInsensitiveMapping

from ...conf import conf
from ...planning import Plan, plan_call
from ...policy import Policy
from ...policy.canonical import content_digest
from ...records import reference
from ...stores import stores
from ..consumers import Consumer
from ..events import Event
from ..handling import Handling
from ..models import InboxMessage
from ..parking import sender_of
from ..policies import RecordOf
from ..registry import consumers
from .receivers import WebhookReceiver, event_of, receiver_of, receivers

METHOD: Final = "WEBHOOK"
"""What stands for the HTTP method in the audit."""

CONSUMER: Final = "consumer:"
"""What the source of a message begins with that a consumer has parked."""


class NobodyThere(LookupError):
    """There is no receiver, or no consumer, for the source of a message."""


def known_sources() -> list[str]:
    """The sources whose messages can be handled: the receivers', and those of listed consumers."""
    names = consumers() if conf.consumers else ()
    return [*sorted(receivers()), *(f"{CONSUMER}{name}" for name in sorted(names))]


def handling_of(message: InboxMessage) -> Callable[[], object] | None:
    """What handles the message; ``None``: there is no handler for its type.

    Raises:
        NobodyThere: there is no receiver or consumer for its source.
    """
    if message.source.startswith(CONSUMER):
        consumer, event, sender = _parked(message)
        return lambda: consumer.handle(event, sender=sender, redelivered=True)
    receiver = _receiver(message)
    handler = receiver.handler_of(message.type)
    if handler is None:
        return None
    headers: Any = CaseInsensitiveMapping(dict(json.loads(message.headers)))
    contents = receiver.verifier.read(headers, bytes(message.body))
    handling = Handling(_plan(receiver, message), event_of(message.source, contents), handler)
    # The claim is committed first, so that an attempt counts that ends with its process.
    return lambda: handling.run(visibly=True)


def record_of(message: InboxMessage) -> RecordOf:
    """Where the record of the message is, or would be.

    Raises:
        NobodyThere: there is no receiver or consumer for its source.
        ValueError: what a consumer has parked is not an event, or lacks its sender.
    """
    if message.source.startswith(CONSUMER):
        consumer, event, sender = _parked(message)
        return consumer.record_of(event, sender=sender)
    store = stores[policy_of(_receiver(message)).store]
    return RecordOf.named(
        store, message.message_id, scope_of(message.source), content_digest(message.digest)
    )


def scope_of(source: str) -> str:
    """The scope of the records of a source's messages."""
    return f"webhook:{source}"


def reference_of(message: InboxMessage) -> str:
    """What names the message in the ``caused_by`` of its record."""
    return reference(message.message_id, f"inbox:{message.source}")


def policy_of(receiver: type[WebhookReceiver]) -> Policy:
    """The policy of a receiver's handlers, resolved."""
    return _declared(receiver.policy, receiver.ttl).resolved()


@lru_cache(maxsize=256)
def _declared(policy: Policy | None, ttl: timedelta | None) -> Policy:
    # A message can wait for the store, which a request cannot.
    return (policy or Policy()).over(Policy(on_store_error="refuse")).replace(ttl=ttl)


def _plan(receiver: type[WebhookReceiver], message: InboxMessage) -> Plan:
    return plan_call(
        policy_of(receiver),
        key=message.message_id,
        scope=scope_of(message.source),
        name=f"{message.source} {message.type}"[:255],
        content=content_digest(message.digest),
        method=METHOD,
        max_attempts=receiver.max_attempts,
        caused_by=reference_of(message),
    )


def _receiver(message: InboxMessage) -> type[WebhookReceiver]:
    receiver = receiver_of(message.source)
    if receiver is None:
        raise NobodyThere(
            f"No WebhookReceiver has the source {message.source!r}. Is it in the URLconf, and was "
            "its source renamed?"
        )
    return receiver


def _parked(message: InboxMessage) -> tuple[Consumer, Event, str]:
    """The consumer that has parked the message, the event, and its sender."""
    event = Event.from_json(bytes(message.body))
    return _consumer(message), event, sender_of(json.loads(message.headers))


def _consumer(message: InboxMessage) -> Consumer:
    name = message.source.removeprefix(CONSUMER)
    try:
        return consumers()[name]
    except KeyError:
        raise NobodyThere(
            f"No consumer is called {name!r}. List its path in IDEMPOTENCY['CONSUMERS']."
        ) from None
