"""What the documentation's examples sell."""

from __future__ import annotations

from django.db import models


class Charge(models.Model):
    """One row for each charge that was really made."""

    reference = models.CharField(max_length=100)
    amount = models.PositiveIntegerField()

    class Meta:
        app_label = "tests"

    def __str__(self) -> str:
        return self.reference
