"""What the tests count."""

from __future__ import annotations

from django.db import models


class Effect(models.Model):
    """One row for each time that something was really done."""

    reference = models.CharField(max_length=100, db_index=True)
    kind = models.CharField(max_length=16)

    def __str__(self) -> str:
        return f"{self.kind} {self.reference}"


class Standing(models.Model):
    """How something stands, which may be written down twice."""

    reference = models.CharField(max_length=100, unique=True)
    paid = models.BooleanField(default=False)

    def __str__(self) -> str:
        return f"{self.reference}: {'paid' if self.paid else 'not paid'}"
