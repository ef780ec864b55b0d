from django.db import models
from idempotency_django.contrib.concurrency import Versioned, VersionField


class Charge(models.Model):
    reference = models.CharField(max_length=100)
    amount = models.PositiveIntegerField()

    def __str__(self):
        return self.reference


class Order(Versioned, models.Model):
    reference = models.CharField(max_length=100)
    amount = models.PositiveIntegerField(default=0)
    state = models.CharField(max_length=20, default="pending")
    version = VersionField()

    def __str__(self):
        return self.reference


class Receipt(models.Model):
    order_number = models.IntegerField(unique=True)
    amount = models.PositiveIntegerField()

    def __str__(self):
        return str(self.order_number)
