"""The app: add ``"idempotency_django.contrib.messaging"`` to ``INSTALLED_APPS`` for its tables.

Consumers do without it. Streams, the webhook inbox and the outbox need its tables.
"""

from __future__ import annotations

from django.apps import AppConfig
from django.core.checks import Tags, register
from django.utils.translation import gettext_lazy as _


class MessagingConfig(AppConfig):
    """The tables of streams, webhook inbox and outbox."""

    name = "idempotency_django.contrib.messaging"
    label = "idempotency_messaging"
    verbose_name = _("Idempotent messaging")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        # What needs the models can only be imported now.
        from ...stores import register_purge  # noqa: PLC0415
        from . import (  # noqa: PLC0415
            health,
            timeline,  # noqa: F401  # registers the sources of messages
        )
        from .inbox import INBOX, check_receivers  # noqa: PLC0415
        from .outbox.relay import OUTBOX  # noqa: PLC0415
        from .outbox.topics import check_outbox  # noqa: PLC0415

        register(check_receivers, Tags.security)
        register(check_outbox, Tags.compatibility)
        register_purge(INBOX.purge)
        register_purge(OUTBOX.purge)
        health.register_sources()
