"""Records in each state, and people who look at them."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any
from uuid import uuid4

import factory
from django.contrib.auth.models import Permission, User
from django.utils import timezone

from idempotency_django.models import IdempotencyKey, IdempotencyStep
from idempotency_django.stores.records import Status

JSON = [["Content-Type", "application/json"], ["Location", "/api/charges/17/"]]


class IdempotencyKeyFactory(factory.django.DjangoModelFactory[IdempotencyKey]):
    """A completed record that is still replayed; the traits make the others."""

    class Meta:
        model = IdempotencyKey

    class Params:
        in_progress = factory.Trait(
            status=Status.IN_PROGRESS,
            completed_at=None,
            lease_expires_at=factory.LazyFunction(lambda: ago(seconds=-30)),
            response_status=None,
            response_headers="[]",
            response_body=None,
        )
        # In progress, but the lease is over; held ones wait for an operator.
        interrupted = factory.Trait(
            in_progress=True, lease_expires_at=factory.LazyFunction(lambda: ago(minutes=5))
        )
        held = factory.Trait(interrupted=True, hold=True)
        failed = factory.Trait(
            status=Status.FAILED,
            response_status=None,
            response_headers="[]",
            response_body=None,
            error="ValueError: the card of bob@example.org was declined",
        )
        tombstone = factory.Trait(response_body=None)
        permanent = factory.Trait(expires_at=None, purge_at=None)
        # Expired a day ago, kept for the audit for another month …
        expired = factory.Trait(created_at=factory.LazyFunction(lambda: ago(days=2)))
        # … or not kept any longer.
        purgeable = factory.Trait(
            expired=True, purge_at=factory.LazyAttribute(lambda record: record.expires_at)
        )

    key = factory.LazyFunction(lambda: str(uuid4()))
    scope = "user:1|POST /api/charges/"
    operation = "POST /api/charges/"
    fingerprint = "f" * 64
    status = Status.COMPLETED
    owner_token = "5ec2e7" * 5
    response_status = 201
    response_headers = json.dumps(JSON)
    response_body = b'{"id":17,"customer":"alice@example.org"}'
    created_at = factory.LazyFunction(timezone.now)
    completed_at = factory.LazyAttribute(lambda r: r.created_at + timedelta(seconds=1))
    expires_at = factory.LazyAttribute(lambda r: r.created_at + timedelta(days=1))
    purge_at = factory.LazyAttribute(lambda r: r.expires_at and r.expires_at + timedelta(days=30))
    principal = "user:1"
    method = "POST"
    path = "/api/charges/"


class StaffFactory(factory.django.DjangoModelFactory[User]):
    """Somebody who may log in to the admin, and holds the permissions that are named."""

    class Meta:
        model = User
        skip_postgeneration_save = True

    username = factory.Sequence(lambda n: f"staff-{n}")
    is_staff = True

    @factory.post_generation
    def permissions(self, create: bool, names: Any, **options: Any) -> None:
        """Grant the permissions of this package's apps with these codenames."""
        held = Permission.objects.filter(
            content_type__app_label__startswith="idempotency_", codename__in=names or []
        )
        self.user_permissions.set(held)  # type: ignore[attr-defined]  # self is the user


def ago(**duration: float) -> Any:
    """A moment in the past."""
    return timezone.now() - timedelta(**duration)


def record(alias: str = "default", **traits: Any) -> IdempotencyKey:
    """A record in one of the databases."""
    made = IdempotencyKeyFactory.build(**traits)
    made.save(using=alias)
    return made


def records(count: int, alias: str = "default", **traits: Any) -> list[IdempotencyKey]:
    """Several records in one of the databases, in one statement."""
    made = IdempotencyKeyFactory.build_batch(count, **traits)
    return IdempotencyKey.objects.using(alias).bulk_create(made)


def copies(count: int, made: IdempotencyKey) -> list[IdempotencyKey]:
    """Many records like one that is there, but for their keys, in its database."""
    fields = [field.attname for field in made._meta.concrete_fields if not field.primary_key]
    values = {name: getattr(made, name) for name in fields}
    return IdempotencyKey.objects.using(made._state.db).bulk_create(
        IdempotencyKey(**{**values, "key": str(uuid4())}) for _ in range(count)
    )


def step(made: IdempotencyKey, number: int = 0, **columns: Any) -> IdempotencyStep:
    """A recovery point of a record, in its database."""
    stored = IdempotencyStep(
        record=made,
        **{
            "name": f"step-{number}",
            "attempt": 1,
            "result": json.dumps({"number": number}),
            "completed_at": made.created_at + timedelta(milliseconds=number),
            **columns,
        },
    )
    stored.save(using=made._state.db)
    return stored
