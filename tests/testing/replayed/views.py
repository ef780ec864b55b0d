"""The project's views. With MUTATED=1, five of them have the bugs that people write."""

from __future__ import annotations

import os
import threading
from typing import Any

from celery import Celery
from django.contrib.auth import authenticate, login
from django.core.cache import cache
from django.core.mail import send_mail
from django.db import transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.csrf import csrf_exempt
from rest_framework import mixins, viewsets
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.throttling import UserRateThrottle
from rest_framework.views import APIView
from shop.models import Charge, Receipt
from shop.serializers import ChargeSerializer

from idempotency_django import Policy, idempotency_exempt, idempotent
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.http.serving import IdempotentRequest
from idempotency_django.policy import keys

MUTATED = os.environ.get("MUTATED") == "1"
NOTHING = type("Nothing", (), {})
lock = threading.Lock()
tasks = Celery("replayed")
tasks.conf.task_always_eager = True


def provider(amount: int) -> str:
    """Stands for a call of somebody else's service."""
    return f"ch_{amount}"


@tasks.task(name="ship")
def ship(reference: str) -> None:
    """Stands for a task."""


class ChargeViewSet(
    NOTHING if MUTATED else IdempotentViewMixin,  # type: ignore[misc]
    mixins.CreateModelMixin,
    mixins.UpdateModelMixin,
    mixins.DestroyModelMixin,
    viewsets.GenericViewSet,
):
    """Mutated, nothing protects it."""

    queryset = Charge.objects.all()
    serializer_class = ChargeSerializer


class OrdersThrottle(UserRateThrottle):
    """Three orders a day."""

    scope = "orders"


def _order(request: Request) -> Response:
    order = Charge.objects.create(reference=request.data["reference"], amount=1)
    Receipt.objects.create(order_number=order.pk, amount=1)
    ship.delay(order.reference)
    provider(order.amount)
    return Response({"id": order.pk}, status=201)


class OrderView(IdempotentViewMixin, APIView):
    throttle_classes = [OrdersThrottle]
    idempotency_policy = Policy(required=True)

    def post(self, request: Request) -> Response:
        return _order(request)


class LookUpLockedView(APIView):
    """Locks the look-up of the key, but not the execution."""

    throttle_classes = [OrdersThrottle]

    def post(self, request: Request) -> Response:
        if (key := request.headers.get("Idempotency-Key")) is None:
            return Response({"detail": "a key is needed"}, status=400)
        key = f"{request.user.pk}-{key}"
        with lock:
            stored = cache.get(key)
        if stored is not None:
            return Response(stored, status=201)
        response = _order(request)
        cache.set(key, response.data)
        return response


class TransferView(IdempotentViewMixin, APIView):
    def post(self, request: Request) -> Response:
        transfer = Charge.objects.create(reference=request.user.username, amount=2)
        return Response({"transfer": transfer.pk, "by": transfer.reference}, status=201)


class WithoutUserView(APIView):
    """Looks its responses up by the key alone."""

    def post(self, request: Request) -> Response:
        key = request.headers.get("Idempotency-Key", "")
        if key and (stored := cache.get(key)):
            return Response(stored, status=201)
        response = TransferView.post(self, request)  # type: ignore[arg-type]
        cache.set(key, response.data)
        return response


class InvoiceView(IdempotentViewMixin, APIView):
    """Sends an invoice after the commit."""

    def post(self, request: Request) -> Response:
        Charge.objects.create(reference=request.data["reference"], amount=3)
        transaction.on_commit(self.send)
        return Response(status=204)

    def send(self) -> None:
        send_mail("Your invoice", "", None, ["carol@example.com"])


class AnnouncedInvoiceView(InvoiceView):
    """Does so for each request, also for a retry."""

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super().initial(request, *args, **kwargs)
        transaction.on_commit(self.send)


@csrf_exempt
def sign_in(request: HttpRequest) -> HttpResponse:
    """A login: it writes to the session and to ``last_login``."""
    user = authenticate(username=request.POST["name"], password=request.POST["password"])
    if user is None:
        return HttpResponse(status=403)
    login(request, user)
    return HttpResponse(status=204)


@idempotency_exempt
@csrf_exempt
def count(request: HttpRequest) -> HttpResponse:
    """Counts visits; a second one does no harm."""
    Charge.objects.create(reference="visit", amount=0)
    return HttpResponse(status=204)


@csrf_exempt
def upload(request: HttpRequest) -> HttpResponse:
    """Under the middleware, where a key is optional."""
    file = request.FILES["file"]
    Charge.objects.create(reference=file.read().decode(), amount=4)
    return JsonResponse({"size": file.size}, status=201)


upload.idempotency_policy = Policy()  # type: ignore[attr-defined]


@csrf_exempt
@idempotent(key=keys.deterministic("reference"))
def derived(request: HttpRequest) -> HttpResponse:
    """Its key is derived from the reference."""
    Charge.objects.create(reference=request.POST["reference"], amount=5)
    return HttpResponse(status=201)


@csrf_exempt
def leave(request: HttpRequest) -> HttpResponse:
    """Notes that somebody leaves."""
    Charge.objects.create(reference="left", amount=8)
    return HttpResponse(status=204)


@csrf_exempt
@idempotent(mode="leased")
async def asynchronous(request: IdempotentRequest) -> HttpResponse:
    await request.idempotency.astep("book", lambda: Charge.objects.create(amount=7).pk)
    return HttpResponse(status=201)
