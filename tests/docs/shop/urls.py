"""The URLs behind the examples of pages that bring none of their own."""

from __future__ import annotations

from django.contrib import admin
from django.http import HttpRequest, StreamingHttpResponse
from django.urls import include, path
from rest_framework import viewsets
from rest_framework.routers import SimpleRouter
from shop.models import Charge
from shop.serializers import ChargeSerializer

from idempotency_django.decorators import idempotent
from idempotency_django.drf import IdempotentViewMixin
from idempotency_django.policy import Policy


class ChargeViewSet(IdempotentViewMixin, viewsets.ModelViewSet[Charge]):
    queryset = Charge.objects.order_by("pk")
    serializer_class = ChargeSerializer
    idempotency_policy = Policy(required=True)


@idempotent
def export(request: HttpRequest) -> StreamingHttpResponse:
    return StreamingHttpResponse(iter([b"id,reference,amount\n"]), content_type="text/csv")


router = SimpleRouter()
router.register("charges", ChargeViewSet)
urlpatterns = [
    path("", include(router.urls)),
    path("exports/", export),
    path("admin/", admin.site.urls),
]
