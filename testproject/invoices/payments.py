"""One payment per order: the row itself keeps a second one out."""

from __future__ import annotations

from django.contrib.auth.models import AbstractBaseUser

from idempotency_django.contrib.concurrency import once_per
from idempotency_django.policy import Policy

from ..payments.models import Effect, Kind
from .models import Payment

CURRENCY = "EUR"


# The record is kept where the row is, also where those of requests are in Redis.
@once_per("order", model=Payment, policy=Policy(store="database"))
def pay(order: str, amount: int, owner: AbstractBaseUser) -> Payment:
    """Pay for an order. Another amount, or another caller, is refused."""
    effect = Effect.objects.create(
        kind=Kind.PAYMENT, owner=owner, reference=order, amount=amount, currency=CURRENCY
    )
    return Payment.objects.create(order=order, amount=amount, owner=owner, effect=effect)
