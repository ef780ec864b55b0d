"""The same clients on httpx2, the successor of httpx. Install ``httpx2`` for them."""

from __future__ import annotations

import httpx2

from .sending import AsyncSending, Sending


class IdempotentClient(Sending, httpx2.Client):
    """:class:`idempotency_django.client.IdempotentClient`, on ``httpx2.Client``."""


class AsyncIdempotentClient(AsyncSending, httpx2.AsyncClient):
    """:class:`idempotency_django.client.AsyncIdempotentClient`, on ``httpx2.AsyncClient``."""
