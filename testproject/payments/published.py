"""A payment, and a message that tells another process of it: committed together, or not at all."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.models import User
from django.db import transaction
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django.contrib.messaging import Consumer, Event, publish
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.engine.context import ExecutionContext
from idempotency_django.policy import Policy

from .effects import make, understood
from .faults import Faults
from .models import Effect, Kind

bookkeeping = Consumer("bookkeeping", policy=Policy(store="database"))


class PublishedView(IdempotentViewMixin, APIView):
    """The effect and its message are in one transaction, which the key's record is in as well."""

    idempotency_policy = Policy(store="database")

    def post(self, request: Request) -> Response:
        asked = understood(request.data)
        Faults(request).sleep()
        with transaction.atomic():
            receipt = make(request, Kind.PUBLISHED, asked)
            data = {**dict(asked.validated_data), "owner": request.user.get_username()}
            publish("payments", data, type="payment.made", group=data["owner"])
        return Response(receipt["body"], Faults(request).status(201), headers=receipt["headers"])


@bookkeeping.on("payment.made")
def book(event: Event, _: ExecutionContext) -> dict[str, Any]:
    """Make an effect of its own, in the process that relays."""
    owner = User.objects.get(username=event.data["owner"])
    asked = {name: event.data[name] for name in ("reference", "amount", "currency")}
    return {"effect": Effect.objects.create(kind=Kind.CONSUMED, owner=owner, **asked).pk}
