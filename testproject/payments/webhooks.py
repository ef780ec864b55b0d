"""Webhooks: two senders, whose messages are stored at once and handled in the background.

``WEBHOOK_SECRET`` and ``STRIPE_WEBHOOK_SECRET`` are what they sign with.
"""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.contrib.auth.models import User

from idempotency_django.contrib.messaging import Event, StandardWebhooks, Stripe, WebhookReceiver
from idempotency_django.engine.context import ExecutionContext
from idempotency_django.policy import Policy

from .effects import understood
from .models import Kind

IN_DATABASE = Policy(store="database")
DEFAULTS = {"amount": 100, "currency": "EUR"}


class StandardHook(WebhookReceiver):
    """A sender of Standard Webhooks."""

    source = "standard"
    verifier = StandardWebhooks(lambda: [settings.WEBHOOK_SECRET])
    policy = IN_DATABASE


class StripeHook(WebhookReceiver):
    """Stripe."""

    source = "stripe"
    verifier = Stripe(lambda: [settings.STRIPE_WEBHOOK_SECRET])
    policy = IN_DATABASE


@StandardHook.on("*")
def handle(event: Event, _: ExecutionContext) -> dict[str, Any]:
    """Make the effect that the data of any message asks for."""
    return _make(_member(event.data, "data"))


@StripeHook.on("*")
def handle_stripe(event: Event, _: ExecutionContext) -> dict[str, Any]:
    """The same, of an event of Stripe, which carries our own reference in the metadata."""
    concerned = _member(_member(event.data, "data"), "object")
    return _make(_member(concerned, "metadata"))


def _member(data: Any, name: str) -> Any:
    value = data.get(name) if isinstance(data, dict) else None
    return value if isinstance(value, dict) else {}


def _make(asked: dict[str, Any]) -> dict[str, Any]:
    known = {name: asked[name] for name in ("reference", "amount", "currency") if name in asked}
    effect = understood({**DEFAULTS, **known})
    made = effect.save(kind=Kind.WEBHOOK, owner=User.objects.get(username="alice"))
    return {"effect": made.pk}
