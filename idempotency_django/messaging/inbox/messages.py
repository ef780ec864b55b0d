"""What a message of the inbox is to its handler: an event, and an operation with a record."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any, Final

from django.utils.datastructures import CaseInsensitiveMapping

from ...planning import Plan, plan_call
from ...policy import Policy
from ...policy.canonical import content_digest
from ...records import reference
from ...stores import Store, stores
from ..events import Event
from ..handling import Handling
from ..models import InboxMessage
from ..registry import consumers
from .receivers import WebhookReceiver, event_of, receiver_of

METHOD: Final = "WEBHOOK"
"""What stands for the HTTP method in the audit."""

CONSUMER: Final = "consumer:"
"""What the source of a message begins with that a consumer has parked."""


class NobodyThere(LookupError):
    """There is no receiver, or no consumer, for the source of a message."""


@dataclass(frozen=True, slots=True)
class RecordOf:
    """Where the record of a message is."""

    store: Store
    key: str
    scope: str


def handling_of(message: InboxMessage) -> Callable[[], object] | None:
    """What handles the message; ``None``: there is no handler for its type.

    Raises:
        NobodyThere: there is no receiver or consumer for its source.
    """
    if message.source.startswith(CONSUMER):
        consumer, event = _consumer(message), Event.from_json(bytes(message.body))
        return lambda: consumer.handle(event, redelivered=True)
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
    """
    if message.source.startswith(CONSUMER):
        # What a consumer calls the record of an event is its own business.
        handling = _consumer(message)._handling(Event.from_json(bytes(message.body)), "")
        operation = handling.plan.operation
        return RecordOf(handling.plan.store, operation.key, operation.scope)
    policy = policy_of(_receiver(message))
    return RecordOf(stores[policy.store], message.message_id, scope_of(message.source))


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


def _consumer(message: InboxMessage) -> Any:
    name = message.source.removeprefix(CONSUMER)
    try:
        return consumers()[name]
    except KeyError:
        raise NobodyThere(
            f"No consumer is called {name!r}. List its path in IDEMPOTENCY['CONSUMERS']."
        ) from None
