"""The system checks (``manage.py check``); their ids are stable and never used twice.

=====================================  =========================================================
id                                     problem
=====================================  =========================================================
``idempotency_django.E001``            ``IDEMPOTENCY`` has an unknown setting
``idempotency_django.E002``            a setting has an invalid value
``idempotency_django.E003``            a store cannot be created or used, or a policy names no store
``idempotency_django.W007``            a store's database is not that of the effects or messages
``idempotency_django.E012``            ``idempotency_policies`` names an unknown action
``idempotency_django.W015``            the Redis server may evict keys: retries execute again
``idempotency_django.W016``            the Redis server cannot be reached
``idempotency_django.W018``            a store's cache is local to each process
``idempotency_django.E019``            a policy needs a feature that its store or mode lacks
``idempotency_django.E020``            ``on_conflict="accepted"`` without a URL for the status view
``idempotency_django.E022``            a view with a policy cannot be protected: it refuses keys
``idempotency_django.W023``            the middleware cannot protect views without a policy
``idempotency_django.W026``            a store in the memory of one process, and ``DEBUG`` is off
``idempotency_django.E032``            a model without both ``Versioned`` and one ``VersionField``
``idempotency_django.E034``            a form of the admin that may lack a model's version
``idempotency_django.E041``            a receiver of webhooks cannot be used
``idempotency_django.E043``            a topic of the outbox cannot be used
``idempotency_django.E060``            a view has a policy, but no protection
``idempotency_django.W061``            a Celery task has a policy or key, but not our base class
``idempotency_django.E062``            a leased view is in a transaction of ``ATOMIC_REQUESTS``
``idempotency_django.W071``            ``MIDDLEWARE_PROTECTS`` names no route or namespace
``idempotency_django.W072``            a Django that this version was not tested with
=====================================  =========================================================
"""

from __future__ import annotations

from django.core.checks import Tags, register

from .configuration import (
    check_django,
    check_settings,
    check_stores,
)
from .inventory import Endpoint, endpoint_of, endpoints, readable_route
from .views import check_views

__all__ = ["Endpoint", "endpoint_of", "endpoints", "readable_route", "register_checks"]


def register_checks() -> None:
    """Register the checks; once, when the app is ready."""
    register(check_settings, Tags.security)
    register(check_stores, Tags.security)
    register(check_views, Tags.security)
    register(check_django, Tags.compatibility)
