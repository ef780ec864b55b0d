"""The variants that are compared, as WSGI applications, and what is sent to them."""

from __future__ import annotations

import json
import uuid
from typing import Final

import django
from django.conf import settings
from django.core.handlers.wsgi import WSGIHandler
from django.test import override_settings

BARE: Final = "bare"
ATOMIC: Final = "atomic"
MIXIN: Final = "mixin"
MEMORY: Final = "memory"
LEASED: Final = "leased"
FENCED: Final = "fenced"
STEPS: Final = "steps"
REDIS: Final = "redis"
CACHED: Final = "cached"
OTHER: Final = "other"
LABELS: Final = {
    BARE: "bare view",
    ATOMIC: "bare view in `transaction.atomic()`",
    MIXIN: "`IdempotentViewMixin`",
    MEMORY: "`IdempotentViewMixin` on `MemoryStore`",
    LEASED: '`IdempotentViewMixin`, `mode="leased"`',
    FENCED: "… and its INSERT within `idempotency.atomic()`",
    STEPS: "… and its INSERT in the second of three steps",
    REDIS: "`IdempotentViewMixin` on `RedisStore`",
    CACHED: "`IdempotentViewMixin` on `CachedStore`",
    OTHER: "django-idempotency-key on Redis",
}
SERVED: Final = BARE, MIXIN, LEASED, REDIS, CACHED, OTHER
"""Those that are measured over HTTP as well."""

ORDER: Final = {"reference": "benchmark", "amount": 1250, "currency": "EUR"}

_MIDDLEWARE: Final = {OTHER: ["idempotency_key.middleware.ExemptIdempotencyKeyMiddleware"]}


def application(variant: str) -> WSGIHandler:
    """A WSGI application with the middleware that a variant needs, and no other's."""
    django.setup(set_prefix=False)
    added = _MIDDLEWARE.get(variant, [])
    with override_settings(MIDDLEWARE=[*settings.MIDDLEWARE, *added]):
        return WSGIHandler()


def new_key() -> str:
    return str(uuid.uuid4())


def order(reference: str = "benchmark") -> bytes:
    """The body of a request."""
    return json.dumps({**ORDER, "reference": reference}).encode()
