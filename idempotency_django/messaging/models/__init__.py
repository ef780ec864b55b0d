"""The tables of the app ``idempotency_django.messaging``."""

from __future__ import annotations

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured

if not apps.is_installed("idempotency_django.messaging"):
    raise ImproperlyConfigured(
        "Streams, the webhook inbox and the outbox have tables of their own. Add "
        '"idempotency_django.messaging" to INSTALLED_APPS and run "manage.py migrate".'
    )

from .inbox import InboxMessage  # where the app is missing, the error says so
from .outbox import OutboxMessage, OutboxStream
from .streams import StreamPosition

__all__ = ["InboxMessage", "OutboxMessage", "OutboxStream", "StreamPosition"]
