from __future__ import annotations

from django.contrib import admin
from django.http import HttpRequest, HttpResponse
from django.urls import include, path
from django.views.decorators.http import require_safe

from .greeting import index


@require_safe
def healthz(request: HttpRequest) -> HttpResponse:  # noqa: ARG001  # a view takes the request
    return HttpResponse("ok\n", content_type="text/plain")


urlpatterns = [
    path("", index),
    path("healthz", healthz),
    path("admin/", admin.site.urls),
    path("", include("testproject.payments.urls")),
    path("", include("testproject.invoices.urls")),
]
