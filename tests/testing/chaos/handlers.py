"""Handlers of messages that look right, and one that is. A message is the reference of an effect.

What they have seen is in ``Group``, whose names are unique, or in ``Effect``, where nothing is.
"""

from __future__ import annotations

from django.contrib.auth.models import Group
from django.db import router, transaction

from idempotency_django.engine.context import ExecutionContext
from idempotency_django.engine.functions import idempotent_call
from idempotency_django.policy import Policy
from tests.models import Effect
from tests.testing.chaos.harness import Service

LEASED = Policy(mode="leased")

provider = Service("provider")
_seen: set[str] = set()


def message(number: int) -> str:
    """The message of this number."""
    return f"m-{number}"


def effects(message: str) -> int:
    """How often the message was handled."""
    return Effect.objects.filter(reference=message).count()


def calls(message: str) -> int:
    """How often the provider did something for the message."""
    return provider.effects(message)


def unique_name(message: str) -> None:
    """Right: the database says whether it is the first, in the effect's own transaction."""
    with transaction.atomic(using=router.db_for_write(Effect)):
        _, first = Group.objects.get_or_create(name=message)
        if first:
            Effect.objects.create(reference=message)


def derived_key(message: str) -> None:
    """Right: each attempt sends the same key."""

    def pay(execution: ExecutionContext) -> str:
        return provider.call(message, key=execution.derive_key("pay"))

    idempotent_call(pay, key=message, scope="payments", policy=LEASED)


def looks_first(message: str) -> None:
    """Wrong: two of them can look before either writes."""
    if not Effect.objects.filter(reference=message).exists():
        Effect.objects.create(reference=message)


def marks_first(message: str) -> None:
    """Wrong: whoever dies after the first commit has acknowledged what is not done."""
    _, first = Group.objects.get_or_create(name=message)
    if first:
        Effect.objects.create(reference=message)


def marks_last(message: str) -> None:
    """Wrong: whoever dies between the two commits does it again."""
    if not Group.objects.filter(name=message).exists():
        Effect.objects.create(reference=message)
        Group.objects.get_or_create(name=message)


def remembers(message: str) -> None:
    """Wrong: no other process knows."""
    if message not in _seen:
        Effect.objects.create(reference=message)
        _seen.add(message)


def no_key(message: str) -> None:
    """Wrong: the provider cannot tell a second attempt from a second payment."""

    def pay(execution: ExecutionContext) -> str:
        return provider.call(message)

    idempotent_call(pay, key=message, scope="payments", policy=LEASED)


def locks(message: str) -> None:
    """Wrong: the lock outlives its owner, and nobody ever takes it."""
    _, free = Group.objects.get_or_create(name=f"lock of {message}")
    if not free:
        raise RuntimeError("Somebody is handling it.")
    unique_name(message)
    Group.objects.filter(name=f"lock of {message}").delete()
