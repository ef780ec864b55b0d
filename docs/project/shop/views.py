from idempotency_django import Policy
from idempotency_django.drf import IdempotentViewMixin
from rest_framework import viewsets

from shop.models import Charge
from shop.serializers import ChargeSerializer


class ChargeViewSet(IdempotentViewMixin, viewsets.ModelViewSet):
    queryset = Charge.objects.order_by("pk")
    serializer_class = ChargeSerializer
    idempotency_policy = Policy(required=True)
