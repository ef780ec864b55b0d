"""A webhook of the tests: received, processed later, with effects here and elsewhere."""

from __future__ import annotations

import json
from typing import Any

from django.test import Client
from django.urls import path

from idempotency_django.contrib.messaging import (
    Event,
    StandardWebhooks,
    WebhookReceiver,
    process_due,
)
from idempotency_django.contrib.messaging.models import InboxMessage
from idempotency_django.engine.context import ExecutionContext
from idempotency_django.policy import Policy
from tests.models import Effect
from tests.testing.chaos.handlers import effects
from tests.testing.chaos.harness import Service

provider = Service("provider")


class Hook(WebhookReceiver):
    """Signed as Standard Webhooks says."""

    source = "chaos"
    verifier = StandardWebhooks(["whsec_" + "a" * 32])
    policy = Policy(mode="leased")


@Hook.on("paid")
def paid(event: Event, execution: ExecutionContext) -> None:
    """Two steps, one of them elsewhere."""
    key = execution.derive_key("pay")
    execution.step("pay", lambda: provider.call(event.id, key=key))
    execution.step("book", lambda: Effect.objects.create(reference=event.id).pk)


urlpatterns = [path("", Hook.as_view())]


def deliver(message_id: str) -> Any:
    """Send a webhook, and process what was received; acknowledged when it is handled."""
    body = json.dumps({"type": "paid", "data": {}}).encode()
    signed = Hook.verifier.sign(body, message_id=message_id)
    response = Client().post("/", body, content_type="application/json", headers=signed)
    if response.status_code == 200:
        process_due(sources=[Hook.source])
        state = InboxMessage.objects.get(source=Hook.source, message_id=message_id).state
        if state != "done":
            raise RuntimeError(f"The message is {state}.")
    return response


def counts(message_id: str) -> dict[str, int]:
    """What was done for the message."""
    return {"payments": provider.effects(message_id), "entries": effects(message_id)}
