"""The app: add ``"idempotency_django"`` to ``INSTALLED_APPS``."""

from __future__ import annotations

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _

from .checks import register_checks


class IdempotencyConfig(AppConfig):
    """Registers the system checks when the apps are ready."""

    name = "idempotency_django"
    verbose_name = _("Idempotency")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        register_checks()
