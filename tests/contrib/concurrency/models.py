"""What the tests of conditional writes write."""

from __future__ import annotations

from django.db import models

from idempotency_django.contrib.concurrency import Versioned, VersionField


class Ticket(Versioned, models.Model):
    """One table, with a version and a state."""

    title = models.CharField(max_length=100, default="")
    state = models.CharField(max_length=20, default="pending")
    amount = models.IntegerField(default=0)
    edited_at = models.DateTimeField(auto_now=True)
    version = VersionField()


class UrgentTicket(Ticket):
    """Two tables, of which the first one has the version."""

    deadline = models.CharField(max_length=20, default="today")


class Base(models.Model):
    """A table without a version."""

    name = models.CharField(max_length=100, default="")


class Extended(Versioned, Base):
    """Two tables, of which the second one has the version."""

    note = models.CharField(max_length=100, default="")
    revision = VersionField()


class Seat(models.Model):
    """A table whose primary keys are chosen, without a version."""

    code = models.CharField(max_length=4, primary_key=True)
    row = models.CharField(max_length=4, default="")


class SeatTicket(Seat, Ticket):
    """Three tables: the version and the state are in that of the second parent."""


class UrgentProxy(UrgentTicket):
    """The two tables under another name."""

    class Meta:
        proxy = True


class Country(Versioned, models.Model):
    """A table whose primary keys are chosen."""

    code = models.CharField(max_length=2, primary_key=True)
    name = models.CharField(max_length=100)
    version = VersionField()


class Owner(models.Model):
    """Whom a payment belongs to."""

    name = models.CharField(max_length=100, unique=True, null=True)  # noqa: DJ001  # for its NULLs


class Deed(Versioned, models.Model):
    """Who owns something, with a version."""

    owner = models.ForeignKey(Owner, on_delete=models.CASCADE)
    version = VersionField()


class Payment(models.Model):
    """One row per order; and another constraint."""

    order = models.IntegerField(unique=True)
    owner = models.ForeignKey(Owner, on_delete=models.CASCADE, null=True)
    amount = models.IntegerField(default=0)
    receipt = models.CharField(max_length=20, null=True, unique=True)  # noqa: DJ001  # the same

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["owner", "amount"], name="one_amount_per_owner"),
        ]
