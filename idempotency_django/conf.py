"""The ``IDEMPOTENCY`` setting: one live property for each of its names.

Nothing is read at import and nothing is kept, so ``override_settings`` just works. A wrong value
is reported by the system checks (``manage.py check``) and, where it is used, as
:exc:`~django.core.exceptions.ImproperlyConfigured`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured

DEFAULT_STORES: Final[Mapping[str, Mapping[str, Any]]] = {
    "default": {"BACKEND": "idempotency_django.stores.database.DatabaseStore"}
}

NO_POLICY: Final[Mapping[str, Any]] = {}

NAMES: Final = frozenset(
    {
        "DOCS_URL",
        "HEADER",
        "MIDDLEWARE_PROTECTS",
        "POLICY",
        "REPLAYED_HEADER",
        "STATUS_CODES",
        "STORES",
    }
)
"""Every name that ``IDEMPOTENCY`` may hold; the system checks refuse others."""

ALL_UNSAFE: Final = "unsafe"
WITH_POLICY: Final = "with-policy"


class Settings:
    """Reads ``settings.IDEMPOTENCY`` anew at each access."""

    @property
    def raw(self) -> Mapping[str, Any]:
        """The setting as it was written."""
        value = getattr(django_settings, "IDEMPOTENCY", {})
        if not isinstance(value, Mapping):
            raise ImproperlyConfigured(
                f"The IDEMPOTENCY setting must be a dict, not {type(value).__name__}."
            )
        return value

    @property
    def docs_url(self) -> str:
        """Where problem types link to; the slug of the problem is appended."""
        return str(self.raw.get("DOCS_URL", "https://idempotency-django.readthedocs.io/problems/"))

    @property
    def header(self) -> str:
        """The request header that carries the key."""
        return str(self.raw.get("HEADER", "Idempotency-Key"))

    @property
    def middleware_protects(self) -> str:
        """``"unsafe"``: every view called with an unsafe method; ``"with-policy"``: opt-in."""
        value = self.raw.get("MIDDLEWARE_PROTECTS", ALL_UNSAFE)
        if value not in (ALL_UNSAFE, WITH_POLICY):
            raise ImproperlyConfigured(
                f"IDEMPOTENCY['MIDDLEWARE_PROTECTS'] is {value!r}; it must be {ALL_UNSAFE!r} "
                f"(every view that is not exempt) or {WITH_POLICY!r} (views that have a policy)."
            )
        return str(value)

    @property
    def policy(self) -> Any:
        """The project's :class:`~idempotency_django.policy.Policy`, or a dict of its fields."""
        return self.raw.get("POLICY", NO_POLICY)

    @property
    def replayed_header(self) -> str:
        """The response header that marks a replay."""
        return str(self.raw.get("REPLAYED_HEADER", "Idempotent-Replayed"))

    @property
    def status_codes(self) -> Mapping[str, int]:
        """HTTP status by the slug of an error, where it differs from the error's own."""
        value: Mapping[str, int] = self.raw.get("STATUS_CODES", {})
        return value

    @property
    def stores(self) -> Mapping[str, Mapping[str, Any]]:
        """The stores by alias, each ``{"BACKEND": path, "OPTIONS": {…}}``."""
        value: Mapping[str, Mapping[str, Any]] = self.raw.get("STORES", DEFAULT_STORES)
        return value


conf = Settings()
