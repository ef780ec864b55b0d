"""What the publishers send to each broker is what ``run_consumer`` hands to a consumer."""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction
from django.test import override_settings

from idempotency_django.contrib.messaging import Consumer, Event, Relay, publish
from idempotency_django.contrib.messaging.databases import with_zone
from idempotency_django.contrib.messaging.models import OutboxMessage
from idempotency_django.models import IdempotencyKey
from idempotency_django.stores.records import reference

from .brokers import Broker, Kafka

pytestmark = pytest.mark.django_db(transaction=True)

DATA: dict[str, Any] = {
    "json": {"order": 17, "of": "Zoë", "at": [1.5, None, True]},
    "text": "Grüße, 世界",
    "nothing": None,
    "bytes": b"\x00\xff\r\n{",
}


def entry(broker: Broker) -> dict[str, Any]:
    """The topic's entry in the settings."""
    if isinstance(broker, Kafka):
        config = {"bootstrap.servers": broker.config["bootstrap.servers"]}
        return {"BACKEND": "kafka", "OPTIONS": {"config": config, "topic": broker.place}}
    connection = {"transport_options": broker.options}
    options = {"url": broker.url, "queue": broker.place, "connection": connection}
    return {"BACKEND": "kombu", "OPTIONS": options}


def test_to_the_consumer(broker: Broker) -> None:
    """From publish() to the handler, nothing of an event is lost or changed, and the record of what
    it has caused names the message.
    """
    billing, got = Consumer("billing"), dict[str, Event]()
    ids: dict[str, tuple[Any, str | None]] = {}

    @billing.on("order.paid")
    def book(event: Event, execution: Any) -> None:
        got[event.id] = event

    outbox = {"orders": entry(broker)}
    with override_settings(IDEMPOTENCY={"OUTBOX": outbox}):
        with transaction.atomic():
            for data, group in itertools.product(DATA.values(), ("order 17", None)):
                message_id = publish("orders", data, type="order.paid", group=group)
                ids[message_id] = data, group
        relay = Relay()
        assert relay.drain() == len(ids)
        relay.close()
    broker.drain(billing, lambda: len(got) == len(ids))
    for message in OutboxMessage.objects.all():
        event = got[message.message_id]
        data, group = ids[message.message_id]
        assert (event.source, event.type, event.subject) == ("/orders", "order.paid", group)
        assert (event.data, type(event.data)) == (data, type(data))
        assert abs(event.time - with_zone(message.created_at, "default")) < timedelta(
            milliseconds=1
        )
        name = reference(message.message_id, "outbox:orders")
        assert event.extensions["causedby"] == name
        # A header is a text; JSON has numbers.
        assert str(event.extensions.get("sequence", 0)) == str(message.sequence)
        record = IdempotencyKey.objects.get(key=event.id)
        assert (record.caused_by, record.status) == (name, "completed")
