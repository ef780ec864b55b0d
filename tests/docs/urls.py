"""The URLs behind the examples of pages that bring none of their own."""

from __future__ import annotations

from django.http import HttpRequest, StreamingHttpResponse
from django.urls import include, path
from rest_framework import viewsets
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.routers import SimpleRouter
from shop.models import Order
from shop.serializers import OrderSerializer

from idempotency_django.contrib.concurrency import PreconditionMixin, transition
from idempotency_django.decorators import idempotent
from idempotency_django.drf import IdempotentViewMixin


class OrderViewSet(PreconditionMixin, IdempotentViewMixin, viewsets.ModelViewSet[Order]):
    queryset = Order.objects.order_by("pk")
    serializer_class = OrderSerializer
    require_preconditions = {"PUT", "PATCH", "DELETE"}

    @action(detail=True, methods=["post"])
    def ship(self, request: Request, pk: str) -> Response:
        order = self.get_object()
        transition(order, "paid", "shipped")
        return Response(self.get_serializer(order).data)

    @action(detail=True, methods=["post"])
    def rename(self, request: Request, pk: str) -> Response:
        """Two people at once, in one request."""
        mine, other = self.get_object(), self.get_object()
        other.save()
        mine.save()
        return Response({})


@idempotent
def export(request: HttpRequest) -> StreamingHttpResponse:
    return StreamingHttpResponse(iter([b"id,reference,amount\n"]), content_type="text/csv")


router = SimpleRouter()
router.register("orders", OrderViewSet)
urlpatterns = [
    path("exports/", export),
    path("", include(router.urls)),
    path("", include("config.urls")),
]
