from __future__ import annotations

from django.urls import path

from idempotency_django.http import IdempotencyStatusView

from . import events, jobs, published, views, webhooks

urlpatterns = [
    path("api/charges/", views.ChargeViewSet.as_view({"post": "create"})),
    path("api/orders/", views.OrderView.as_view()),
    path("api/viamiddleware/", views.ViaMiddlewareView.as_view()),
    path("api/unprotected/", views.UnprotectedView.as_view()),
    path("api/transfers/", views.TransferView.as_view()),
    path("api/payouts/", views.PayoutView.as_view()),
    path("api/events/", events.receive),
    path("api/jobs/", jobs.JobView.as_view()),
    path("api/unprotectedjobs/", jobs.UnprotectedJobView.as_view()),
    path("api/published/", published.PublishedView.as_view()),
    path("webhooks/standard/", webhooks.StandardHook.as_view()),
    path("webhooks/stripe/", webhooks.StripeHook.as_view()),
    path("v1/charges", views.StripeChargeView.as_view()),
    path("plain/orders/", views.PlainOrderView.as_view()),
    path("decorated/orders/", views.decorated_order),
    path("async/orders/", views.async_order),
    path("effects/", views.count_effects),
    path("effects/<int:pk>/", views.EffectDetail.as_view(), name="effect"),
    path("postings/", views.count_postings),
    path("operations/<str:token>/", IdempotencyStatusView.as_view(), name="idempotency-status"),
]
