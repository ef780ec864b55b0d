"""The app: add ``"idempotency_django"`` to ``INSTALLED_APPS``."""

from __future__ import annotations

from importlib.util import find_spec

from django.apps import AppConfig, apps
from django.core.checks import Tags, register
from django.utils.translation import gettext_lazy as _

from .checks import register_checks
from .contrib import ninja as _ninja  # noqa: F401  # before any view: it registers itself
from .contrib.concurrency import errors as _concurrency  # noqa: F401  # STATUS_CODES may name all
from .contrib.messaging import errors as _messaging  # noqa: F401


class IdempotencyConfig(AppConfig):
    """Registers the system checks, and the adapters of what is installed, when apps are ready."""

    name = "idempotency_django"
    verbose_name = _("Idempotency")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        register_checks()
        if find_spec("rest_framework"):
            from . import drf  # noqa: F401, PLC0415  # registers itself
        if apps.is_installed("drf_spectacular"):
            from .contrib import openapi  # noqa: F401, PLC0415  # registers itself
        if find_spec("celery"):
            from .contrib.celery import check_celery  # noqa: PLC0415

            register(check_celery, Tags.compatibility)
