"""The policies of consumers."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from django.core.exceptions import ImproperlyConfigured

from ..policy import UNSET, Policy

LIFETIME: Final = timedelta(days=30)
"""How long a consumer remembers an event, unless it or its policy says otherwise."""


def policy_of(name: str, policy: Policy | None, ttl: timedelta | None, store: str | None) -> Policy:
    """The policy of the consumer of that name.

    Raises:
        ImproperlyConfigured: it asks for what a consumer does not have.
    """
    if policy is not None and policy.check_replay not in (UNSET, None):
        raise ImproperlyConfigured(
            f"The policy of the consumer {name!r} has check_replay=, which checks the caller of an "
            "HTTP request. A message has none: check who may send it before calling the consumer."
        )
    # An event can wait for the store, which a request cannot: it is delivered again.
    policy = (policy or Policy()).over(Policy(ttl=LIFETIME, on_store_error="refuse"))
    if ttl is not UNSET:
        policy = policy.replace(ttl=ttl)
    return policy if store is None else policy.replace(store=store)
