from __future__ import annotations

from django.conf import settings
from django.db import models
from django.urls import reverse


class Kind(models.TextChoices):
    """The kind of endpoint that made an effect, by its protection."""

    CHARGE = "charge"
    ORDER = "order"
    UNPROTECTED = "unprotected"
    VIA_MIDDLEWARE = "viamiddleware"
    PLAIN = "plain"
    DECORATED = "decorated"
    ASYNC = "async"
    TRANSFER = "transfer"
    PAYOUT = "payout"
    INVOICE = "invoice"
    PAID = "paid"
    PAYMENT = "payment"
    EVENT = "event"
    JOB = "job"
    PUBLISHED = "published"
    CONSUMED = "consumed"
    WEBHOOK = "webhook"


class Effect(models.Model):
    """The effect of a request: one row for each execution."""

    kind = models.CharField(max_length=16, choices=Kind.choices)
    owner = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE)
    reference = models.CharField(max_length=100, db_index=True)
    amount = models.PositiveBigIntegerField(help_text="In the smallest unit of the currency.")
    currency = models.CharField(max_length=3)
    created_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.kind} {self.reference}: {self.amount} {self.currency}"

    def get_absolute_url(self) -> str:
        return reverse("effect", args=[self.pk])


class Side(models.TextChoices):
    """The two halves of a transfer."""

    DEBIT = "debit"
    CREDIT = "credit"


class Posting(models.Model):
    """One half of a transfer; the effect comes with the second."""

    side = models.CharField(max_length=6, choices=Side.choices)
    owner = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE)
    reference = models.CharField(max_length=100, db_index=True)
    amount = models.PositiveBigIntegerField(help_text="In the smallest unit of the currency.")
    currency = models.CharField(max_length=3)
    created_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.side} {self.reference}: {self.amount} {self.currency}"
