"""For tests: REST framework's client, with keys."""

from __future__ import annotations

from ..lazy import extra
from .clients import KeyedMixin

with extra("drf"):
    from rest_framework.test import APIClient


class IdempotentAPIClient(KeyedMixin, APIClient):
    """REST framework's test client, which sends a new key with each unsafe request. ::

        client = IdempotentAPIClient()
        client.force_authenticate(user)
        first = client.post("/charges/", {"amount": 500})
        assert_replayed(first, client.retry())

    A request that has a key already, also from ``credentials()``, keeps it.
    """
