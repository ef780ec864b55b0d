"""What the measured view creates."""

from __future__ import annotations

from django.db import models


class Order(models.Model):
    """One row for each time that a view was executed."""

    reference = models.CharField(max_length=100, db_index=True)
    amount = models.PositiveIntegerField()
    currency = models.CharField(max_length=3)

    def __str__(self) -> str:
        return self.reference
