"""Tests any HTTP API with idempotency keys from the outside.

Run it with ``python -m idempotency_django.conformance URL``. The API may run on any server. It
needs neither Django nor this package there, and nothing here imports Django. The requirements are
data for runners in any language: ``requirements.yaml`` and ``dialects.yaml``.
"""
