from __future__ import annotations

from django.conf import settings
from django.db import models
from django.urls import reverse

from idempotency_django.contrib.concurrency import Versioned, VersionField


class State(models.TextChoices):
    """The state of an invoice."""

    OPEN = "open"
    PAID = "paid"
    CANCELLED = "cancelled"


class Invoice(Versioned, models.Model):
    """An invoice: several users can change it at the same time, and it is paid once."""

    owner = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE)
    reference = models.CharField(max_length=100, db_index=True)
    amount = models.PositiveBigIntegerField(help_text="In the smallest unit of the currency.")
    currency = models.CharField(max_length=3)
    state = models.CharField(max_length=16, choices=State.choices, default=State.OPEN)
    version = VersionField()

    def __str__(self) -> str:
        return f"{self.reference}: {self.amount} {self.currency}, {self.state}"

    def get_absolute_url(self) -> str:
        return reverse("invoice-detail", args=[self.pk])


class Payment(models.Model):
    """One row per order, whatever the idempotency key."""

    order = models.CharField(max_length=100, unique=True)
    owner = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE)
    amount = models.PositiveBigIntegerField(help_text="In the smallest unit of the currency.")
    effect = models.OneToOneField("payments.Effect", on_delete=models.CASCADE)

    def __str__(self) -> str:
        return f"{self.order}: {self.amount}"
