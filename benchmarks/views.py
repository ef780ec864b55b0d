"""One view: bare, protected by this package, protected by django-idempotency-key."""

from __future__ import annotations

import time
from typing import Any

from django.contrib.auth.models import User
from django.db import transaction
from idempotency_key.decorators import idempotency_key
from rest_framework.authentication import BaseAuthentication
from rest_framework.generics import CreateAPIView
from rest_framework.permissions import IsAuthenticated
from rest_framework.request import Request
from rest_framework.serializers import ModelSerializer

from benchmarks.models import Order
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.policy import Policy

CALLER = User(pk=1, username="caller")
LEASED = Policy(mode="leased")


class Everyone(BaseAuthentication):
    """Authenticates for nothing, so that its cost hides nobody else's."""

    def authenticate(self, request: Request) -> tuple[User, None]:
        return CALLER, None


class OrderSerializer(ModelSerializer):
    class Meta:
        model = Order
        fields = ["id", "reference", "amount", "currency"]


class Bare(CreateAPIView):
    authentication_classes = [Everyone]
    permission_classes = [IsAuthenticated]
    serializer_class = OrderSerializer
    queryset = Order.objects.all()

    def perform_create(self, serializer: Any) -> None:
        super().perform_create(serializer)
        if seconds := self.request.query_params.get("sleep"):
            time.sleep(float(seconds))


class Mixin(IdempotentViewMixin, Bare):
    pass


class Fenced(Mixin):
    def perform_create(self, serializer: Any) -> None:
        with self.request.idempotency.atomic():
            super().perform_create(serializer)


class Stepped(Mixin):
    def perform_create(self, serializer: Any) -> None:
        step = self.request.idempotency.step
        step("check", bool, True)
        step("order", lambda: serializer.save().pk)
        step("notify", dict, sent=True)


bare = Bare.as_view()
atomic = transaction.atomic(Bare.as_view())
mixin = Mixin.as_view()
memory = Mixin.as_view(idempotency_policy=Policy(store="memory"))
leased = Mixin.as_view(idempotency_policy=LEASED)
fenced = Fenced.as_view(idempotency_policy=LEASED)
steps = Stepped.as_view(idempotency_policy=LEASED)
redis = Mixin.as_view(idempotency_policy=Policy(store="redis"))
cached = Mixin.as_view(idempotency_policy=Policy(store="cached"))
other = idempotency_key(Bare.as_view())
