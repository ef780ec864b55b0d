from __future__ import annotations

from rest_framework import serializers

from .models import Invoice


class InvoiceSerializer(serializers.ModelSerializer):
    class Meta:
        model = Invoice
        fields = ["id", "reference", "amount", "currency", "version"]
        read_only_fields = ["version"]


class PaymentSerializer(serializers.Serializer):
    order = serializers.CharField(max_length=100)
    amount = serializers.IntegerField(min_value=0, max_value=2**63 - 1)
