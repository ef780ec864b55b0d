"""The app: add ``"idempotency_django"`` to ``INSTALLED_APPS``."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from django.apps import AppConfig, apps
from django.conf import settings
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
        # What needs the models can only be imported now.
        from .checks.health import check_processes  # noqa: PLC0415

        register_checks()
        register(check_processes, Tags.database, deploy=True)
        if find_spec("rest_framework"):
            # Each registers itself. Neither can be imported where it is not installed.
            from .checks import drf as _checks  # noqa: F401, PLC0415
            from .drf import views as _views  # noqa: F401, PLC0415
        if apps.is_installed("drf_spectacular"):
            from .contrib import openapi  # noqa: F401, PLC0415  # registers itself
        if find_spec("celery"):
            from .checks.celery import check_celery  # noqa: PLC0415

            register(check_celery, Tags.compatibility)
        if _may_have_consumers():
            # Without one, no more of messaging is needed than its errors.
            from .checks.consumers import check_consumers  # noqa: PLC0415

            register(check_consumers, Tags.compatibility)


def _may_have_consumers() -> bool:
    named = getattr(settings, "IDEMPOTENCY", None)
    is_named = isinstance(named, Mapping) and "CONSUMERS" in named
    return is_named or apps.is_installed("idempotency_django.contrib.messaging")
