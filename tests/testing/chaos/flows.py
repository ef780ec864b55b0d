"""What goes through the outbox in the tests: an order, what is published of it, who consumes it."""

from __future__ import annotations

from idempotency_django.contrib.messaging import (
    Consumer,
    Event,
    LocalPublisher,
    Outgoing,
    Relay,
    publish,
)
from idempotency_django.contrib.messaging.models import OutboxMessage
from idempotency_django.engine.context import ExecutionContext
from idempotency_django.engine.functions import idempotent_call
from tests.models import Effect
from tests.testing.chaos.harness import Service

OUTBOX = {
    "orders": {
        "BACKEND": "tests.testing.chaos.flows.Broker",
        "OPTIONS": {"consumers": ["tests.testing.chaos.flows.billing"]},
    }
}
PARTS = ("paid", "shipped")

broker = Service("broker")
billing = Consumer("billing")


@billing.on(*PARTS)
def book(event: Event, execution: ExecutionContext) -> None:
    """One entry for each event."""
    Effect.objects.create(reference=f"{event.data} {event.type}")


class Broker(LocalPublisher):
    """Sends over a network whose responses can be lost, to consumers who are there at once."""

    def send(self, message: Outgoing) -> Exception | None:
        try:
            broker.call(message.message_id)
        except TimeoutError as error:
            return error
        return super().send(message)


def order(reference: str, *, grouped: bool) -> None:
    """Place the order, and send what it has published; acknowledged when all of it is sent."""

    def place(execution: ExecutionContext) -> None:
        Effect.objects.create(reference=reference)
        for part in PARTS:
            publish("orders", reference, type=part, group=reference if grouped else None)

    idempotent_call(place, key=reference, scope="orders")
    relay = Relay()
    relay.drain()
    relay.close()
    pending = OutboxMessage.objects.filter(payload=f'"{reference}"', state="pending").count()
    if pending:
        raise RuntimeError(f"{pending} messages are not sent yet.")


def counts(reference: str) -> dict[str, int]:
    """What was done for the order."""
    done = {name: f"{reference} {name}" for name in PARTS}
    return {
        name: Effect.objects.filter(reference=effect).count()
        for name, effect in {"orders": reference, **done}.items()
    }
