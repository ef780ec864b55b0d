"""What the measured view creates."""

from __future__ import annotations

from concurrency.fields import AutoIncVersionField
from django.db import models
from django_fsm import FSMField, transition

from idempotency_django.contrib.concurrency import versions


class Order(models.Model):
    """One row for each time that a view was executed."""

    reference = models.CharField(max_length=100, db_index=True)
    amount = models.PositiveIntegerField()
    currency = models.CharField(max_length=3)

    def __str__(self) -> str:
        return self.reference


class Versioned(versions.Versioned, models.Model):
    """A row with this package's version."""

    title = models.CharField(max_length=100)
    state = FSMField(default="pending")
    version = versions.VersionField()

    def __str__(self) -> str:
        return self.title

    @transition(field=state, source="pending", target="paid")
    def pay(self) -> None:
        """What is to be done once."""
        Order.objects.create(reference=self.title, amount=1, currency="EUR")


class Plain(models.Model):
    """The same row without a version."""

    title = models.CharField(max_length=100)
    state = FSMField(default="pending")

    def __str__(self) -> str:
        return self.title

    @transition(field=state, source="pending", target="paid")
    def pay(self) -> None:
        """What is to be done once."""
        Order.objects.create(reference=self.title, amount=1, currency="EUR")


class PeerVersioned(models.Model):
    """The same row with django-concurrency's version."""

    title = models.CharField(max_length=100)
    version = AutoIncVersionField()

    def __str__(self) -> str:
        return self.title
