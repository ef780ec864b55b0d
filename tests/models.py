"""What the tests count."""

from __future__ import annotations

from django.db import models


class Effect(models.Model):
    """One row for each time that a view really did something."""

    reference = models.CharField(max_length=100)
