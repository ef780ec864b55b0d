from __future__ import annotations

from importlib import import_module

from django.apps import AppConfig


class PaymentsConfig(AppConfig):
    name = "testproject.payments"

    def ready(self) -> None:
        import_module("testproject.celery")  # the app of all tasks, however they are imported
