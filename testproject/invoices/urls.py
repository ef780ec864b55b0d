from __future__ import annotations

from django.urls import include, path
from rest_framework.routers import SimpleRouter

from . import views

router = SimpleRouter()
router.register("api/invoices", views.InvoiceViewSet, "invoice")

urlpatterns = [
    path("", include(router.urls)),
    path("api/payments/", views.PaymentView.as_view()),
]
