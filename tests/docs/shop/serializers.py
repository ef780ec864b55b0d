"""How the documentation's examples read and write charges."""

from __future__ import annotations

from rest_framework import serializers
from shop.models import Charge


class ChargeSerializer(serializers.ModelSerializer[Charge]):
    class Meta:
        model = Charge
        fields = ("id", "reference", "amount")
