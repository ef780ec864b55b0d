"""Messages that arrive twice take effect once, and messages that must follow a commit do.

Consumers need no tables. The inbox, the outbox and streams do: then this package is an app, too.
"""

from typing import TYPE_CHECKING

from ...lazy import lazily

if TYPE_CHECKING:
    from .brokers.base import Batch, Publisher, Refused
    from .brokers.celery import CeleryPublisher
    from .brokers.http import Endpoint, HttpPublisher
    from .brokers.kafka import KafkaPublisher
    from .brokers.kombu import KombuPublisher
    from .brokers.local import LocalPublisher
    from .consumers import Consumer, Duplicate, Failed, Handled
    from .events import Event
    from .inbox import WebhookReceiver, process_due
    from .outbox.calls import after_commit
    from .outbox.publishing import publish
    from .outbox.relay import Relay
    from .outbox.topics import topic
    from .seen import RedisBloom, RedisSet, SeenFilter
    from .streams import claim_stream
    from .verifiers import Contents, GitHub, Hmac, StandardWebhooks, Stripe, Verifier

__all__ = [
    "Batch",
    "CeleryPublisher",
    "Consumer",
    "Contents",
    "Duplicate",
    "Endpoint",
    "Event",
    "Failed",
    "GitHub",
    "Handled",
    "Hmac",
    "HttpPublisher",
    "KafkaPublisher",
    "KombuPublisher",
    "LocalPublisher",
    "Publisher",
    "RedisBloom",
    "RedisSet",
    "Refused",
    "Relay",
    "SeenFilter",
    "StandardWebhooks",
    "Stripe",
    "Verifier",
    "WebhookReceiver",
    "after_commit",
    "claim_stream",
    "process_due",
    "publish",
    "topic",
]

__getattr__ = lazily(
    __name__,
    globals(),
    {
        "Batch": "brokers.base",
        "CeleryPublisher": "brokers.celery",
        "Consumer": "consumers",
        "Contents": "verifiers",
        "Duplicate": "consumers",
        "Endpoint": "brokers.http",
        "Event": "events",
        "Failed": "consumers",
        "GitHub": "verifiers",
        "Handled": "consumers",
        "Hmac": "verifiers",
        "HttpPublisher": "brokers.http",
        "KafkaPublisher": "brokers.kafka",
        "KombuPublisher": "brokers.kombu",
        "LocalPublisher": "brokers.local",
        "Publisher": "brokers.base",
        "RedisBloom": "seen",
        "RedisSet": "seen",
        "Refused": "brokers.base",
        "Relay": "outbox.relay",
        "SeenFilter": "seen",
        "StandardWebhooks": "verifiers",
        "Stripe": "verifiers",
        "Verifier": "verifiers",
        "WebhookReceiver": "inbox",
        "after_commit": "outbox.calls",
        "claim_stream": "streams",
        "process_due": "inbox",
        "publish": "outbox.publishing",
        "topic": "outbox.topics",
    },
)
