from __future__ import annotations

from django.contrib import admin

from idempotency_django.contrib.concurrency import VersionedForm

from .models import Invoice, Payment


@admin.register(Invoice)
class InvoiceAdmin(admin.ModelAdmin):
    """Two people who edit the same invoice do not overwrite each other."""

    form = VersionedForm
    list_display = ["id", "owner", "reference", "amount", "currency", "state", "version"]
    list_filter = ["state", "owner"]
    search_fields = ["reference"]


@admin.register(Payment)
class PaymentAdmin(admin.ModelAdmin):
    list_display = ["id", "owner", "order", "amount"]
    search_fields = ["order"]
