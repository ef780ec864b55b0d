"""The app: add ``"idempotency_django.contrib.forms"`` to ``INSTALLED_APPS`` for the tag."""

from __future__ import annotations

from django.apps import AppConfig


class FormsConfig(AppConfig):
    """The template tag of forms with a key."""

    name = "idempotency_django.contrib.forms"
    label = "idempotency_forms"
