from __future__ import annotations

from django.apps import AppConfig


class PaymentsConfig(AppConfig):
    name = "testproject.payments"
