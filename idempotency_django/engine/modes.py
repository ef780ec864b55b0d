"""Which of the two guarantees an operation gets, and what cannot be promised."""

from __future__ import annotations

from datetime import timedelta

from django.core.exceptions import ImproperlyConfigured

from ..policy import Policy
from ..stores import Store


def lease_of(policy: Policy, store: Store, *, asynchronous: bool = False) -> timedelta | None:
    """The lease of a claim under this policy; ``None``: its transaction holds it.

    Args:
        policy: a resolved policy.
        store: where the claim is made.
        asynchronous: whether the handler is async, so that no transaction can span it.

    Raises:
        ImproperlyConfigured: the policy needs what cannot be promised here.
    """
    transactional = policy.mode != "leased" and store.supports_transactions and not asynchronous
    if transactional:
        if policy.on_conflict == "accepted":
            raise ImproperlyConfigured(
                "An idempotency policy has on_conflict='accepted' in the transactional mode, "
                "where an operation is not visible before it is completed. Give it mode='leased'."
            )
        return None
    if policy.mode == "transactional":
        reason = (
            "an async view, which no transaction can span"
            if asynchronous
            else f"the store {store.alias!r} ({type(store).__name__}), which has no transactions"
        )
        raise ImproperlyConfigured(
            f"An idempotency policy has mode='transactional' with {reason}. Remove mode=, or set "
            "mode='leased' and read what that mode promises."
        )
    if policy.ttl is not None and policy.ttl <= policy.lease:
        raise ImproperlyConfigured(
            f"An idempotency policy has a ttl of {policy.ttl}, which is not longer than its lease "
            f"of {policy.lease}: its answers could expire before they are sent. Make the ttl "
            "longer than the lease."
        )
    return policy.lease
