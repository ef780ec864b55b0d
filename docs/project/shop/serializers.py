from rest_framework import serializers

from shop.models import Charge, Order


class ChargeSerializer(serializers.ModelSerializer):
    class Meta:
        model = Charge
        fields = ["id", "reference", "amount"]


class OrderSerializer(serializers.ModelSerializer):
    class Meta:
        model = Order
        fields = ["id", "reference", "amount", "version"]
        read_only_fields = ["version"]
