"""Invoices that several users change and one pays; and one payment per order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from django.db import transaction
from rest_framework import viewsets
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django.contrib.concurrency import PreconditionMixin, transition
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.errors import IdempotencyError

from ..payments.faults import Faults
from ..payments.models import Effect, Kind
from ..payments.serializers import EffectSerializer
from .models import Invoice, State
from .payments import pay
from .serializers import InvoiceSerializer, PaymentSerializer


@contextmanager
def simulated(request: Request) -> Iterator[None]:
    """Simulate a fault around an effect, in its transaction; see ``payments/faults.py``."""
    faults = Faults(request)
    faults.sleep()
    with transaction.atomic():
        faults.before_effect()
        yield
        faults.after_effect()


class InvoiceViewSet(PreconditionMixin, IdempotentViewMixin, viewsets.ModelViewSet):
    """A change says which version it is meant for; paying is a transition."""

    require_preconditions = {"PUT", "PATCH", "DELETE"}
    serializer_class = InvoiceSerializer

    def get_queryset(self) -> Any:
        return Invoice.objects.filter(owner=self.request.user)

    def create(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        serializer = self.get_serializer(data=request.data)
        serializer.is_valid(raise_exception=True)
        with simulated(request):
            invoice = serializer.save(owner=request.user)
            effect(Kind.INVOICE, invoice)
        status = Faults(request).status(201)
        return Response(serializer.data, status, headers={"Location": invoice.get_absolute_url()})

    def perform_update(self, serializer: Any) -> None:
        with simulated(self.request):
            serializer.save()

    def perform_destroy(self, instance: Invoice) -> None:
        with simulated(self.request):
            instance.delete()

    @action(detail=True, methods=["post"])
    def pay(self, request: Request, pk: str) -> Response:
        """Pay, once; again it does nothing."""
        return self._move(request, State.OPEN, State.PAID, partial(effect, Kind.PAID))

    @action(detail=True, methods=["post"])
    def cancel(self, request: Request, pk: str) -> Response:
        """Cancel what is not paid."""
        return self._move(request, State.OPEN, State.CANCELLED, None)

    def _move(self, request: Request, source: State, target: State, effect: Any) -> Response:
        invoice = self.get_object()
        with simulated(request):
            transition(invoice, source, target, effect=effect)
        return Response(self.get_serializer(invoice).data, Faults(request).status(200))


def effect(kind: Kind, invoice: Invoice) -> None:
    """The row that is counted."""
    Effect.objects.create(
        kind=kind,
        owner=invoice.owner,
        reference=invoice.reference,
        amount=invoice.amount,
        currency=invoice.currency,
    )


class PaymentView(IdempotentViewMixin, APIView):
    """One payment per order, whatever the key, and without one."""

    def post(self, request: Request) -> Response:
        asked = PaymentSerializer(data=request.data)
        asked.is_valid(raise_exception=True)
        try:
            with simulated(request):
                payment = pay(**asked.validated_data, owner=request.user)
        except IdempotencyError as error:
            error.foreign = False  # it is what this request is about: its client gets the problem
            raise
        made = payment.effect
        return Response(
            {"order": payment.order, **EffectSerializer(made).data},
            Faults(request).status(201),
            headers={"Location": made.get_absolute_url()},
        )
