"""The receivers of the tests, and what their senders send."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from django.test import Client
from django.urls import path

from idempotency_django.contrib.messaging import Event, WebhookReceiver
from idempotency_django.contrib.messaging.verifiers import (
    GitHub,
    StandardWebhooks,
    Stripe,
)
from idempotency_django.policy import Policy
from tests.models import Effect

SECRETS = [f"whsec_{base64.b64encode(bytes([n]) * 24).decode()}" for n in range(3)]

behaviour: dict[str, Callable[[Event, Any], Any]] = {}
"""What handlers do besides their effect, by source."""


class Hook(WebhookReceiver):
    """A sender of Standard Webhooks."""

    source = "shop"
    verifier = StandardWebhooks(SECRETS[:2])
    max_attempts = 2


class Stepping(WebhookReceiver):
    """One whose handler has steps."""

    source = "steps"
    policy = Policy(mode="leased")
    verifier = StandardWebhooks(SECRETS[:1])
    max_attempts = 2
    ttl = None


class Passing(WebhookReceiver):
    """Another sender."""

    source = "passing"
    verifier = Hook.verifier


class StripeHook(WebhookReceiver):
    source = "stripe"
    verifier = Stripe(lambda: SECRETS[:1])


class GitHubHook(WebhookReceiver):
    source = "github"
    verifier = GitHub(SECRETS[:1])


def effect(event: Event, execution: Any) -> Any:
    """The effect that is counted."""
    data = event.data if isinstance(event.data, dict) else {}
    made = Effect.objects.using(execution._store.using).create(
        reference=f"{event.source} {event.id}"[:100]
    )
    if event.source in behaviour:
        return behaviour[event.source](event, execution)
    return {"effect": made.pk, "n": data.get("n")}


for hook in (Hook, Passing, StripeHook, GitHubHook):
    hook.on("order.paid", "invoice.paid", "push", "v1.billing.meter.error_report_triggered")(effect)


@Stepping.on("order.paid")
def stepping(event: Event, execution: Any) -> Any:
    """One step with an effect, then whatever a test wants."""
    done = execution.step("book", lambda: effect(event, execution) and 17)
    derived = execution.derive_key("charge")
    return {"step": done, "key": derived, "attempt": execution.attempt}


urlpatterns = [
    path(f"webhooks/{hook.source}/", hook.as_view())
    for hook in (Hook, Stepping, Passing, StripeHook, GitHubHook)
]


def body_of(kind: str = "order.paid", **data: Any) -> bytes:
    """The body of a message."""
    return json.dumps({"type": kind, **data}).encode()


def deliver(
    receiver: type[WebhookReceiver],
    message_id: str = "m-1",
    body: bytes | None = None,
    *,
    headers: dict[str, str] | None = None,
    client: Client | None = None,
    **options: Any,
) -> Any:
    """Deliver a message as its sender would, with other headers where they are given."""
    sent = body_of() if body is None else body
    signed = receiver.verifier.sign(sent, message_id=message_id, **options)
    return (client or Client()).generic(
        "POST",
        f"/webhooks/{receiver.source}/",
        sent,
        content_type="application/json",
        headers=signed | (headers or {}),
    )


DAY = timedelta(days=1)
