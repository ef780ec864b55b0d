"""What the documentation's examples sell."""

from __future__ import annotations

from django.db import models
from django_fsm import FSMField, transition

from idempotency_django.concurrency.versions import Versioned, VersionField


class Charge(models.Model):
    """One row for each charge that was really made."""

    reference = models.CharField(max_length=100)
    amount = models.PositiveIntegerField()

    class Meta:
        app_label = "tests"

    def __str__(self) -> str:
        return self.reference


class Order(Versioned, models.Model):
    """What several people work on at the same time."""

    reference = models.CharField(max_length=100)
    amount = models.PositiveIntegerField(default=0)
    state = models.CharField(max_length=20, default="pending")
    version = VersionField()

    class Meta:
        app_label = "tests"

    def __str__(self) -> str:
        return self.reference


class Parcel(models.Model):
    """What django-fsm-2 moves from state to state."""

    reference = models.CharField(max_length=100)
    state = FSMField(default="packed", protected=True)

    class Meta:
        app_label = "tests"

    def __str__(self) -> str:
        return self.reference

    @transition(field=state, source=["packed", "returned"], target="sent")
    def send(self, carrier: str) -> str:
        """Hand it over."""
        return f"{carrier} has it"


class Receipt(models.Model):
    """One row per order."""

    order_number = models.IntegerField(unique=True)
    amount = models.PositiveIntegerField()

    class Meta:
        app_label = "tests"

    def __str__(self) -> str:
        return str(self.order_number)
