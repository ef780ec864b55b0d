from __future__ import annotations

from django.urls import path

from idempotency_django import idempotent

from . import views
from .views import MUTATED

charge = views.ChargeViewSet.as_view(
    {"put": "update", "delete": "destroy"},
)
orders = views.LookUpLockedView if MUTATED else views.OrderView
transfers = views.WithoutUserView if MUTATED else views.TransferView
invoices = views.AnnouncedInvoiceView if MUTATED else views.InvoiceView

urlpatterns = [
    path("charges/", views.ChargeViewSet.as_view({"post": "create"})),
    path("charges/<int:pk>/", charge),
    path("orders/", orders.as_view()),
    path("transfers/", transfers.as_view()),
    path("invoices/", invoices.as_view()),
    path("login/", views.sign_in),
    path("visits/", views.count),
    path("uploads/", views.upload),
    path("derived/", views.derived),
    path("leaving/", views.leave if MUTATED else idempotent(views.leave)),
    path("async/", views.asynchronous),
]
