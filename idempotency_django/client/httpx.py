"""Clients of httpx: the extra ``[client]``."""

from __future__ import annotations

import httpx

from .sending import AsyncSending, Sending


class IdempotentClient(Sending, httpx.Client):
    """An ``httpx.Client`` that sends unsafe requests with a key, and retries them with that key.

    ::

        client = IdempotentClient(base_url="https://shop.example.com")
        client.post("/charges/", json={"amount": 500}, extensions={"idempotency_key": key})

    Without ``idempotency_key``, a request gets a new key. Within an execution, it gets a key that
    is the same on each attempt at the execution. ``None`` turns key and retries off.

    A response is returned if it holds for each attempt. Each exception has the attribute
    ``idempotency_key``. Safe requests are sent as they are.

    Args:
        args: as for ``httpx.Client``.
        options: those of :class:`~idempotency_django.client.retrying.Retries`, and those of
            ``httpx.Client``.

    Raises:
        OutcomeUnknown: raised by requests: no response holds for each attempt.
        ValueError: raised by requests: the key is invalid, the body cannot be sent twice, or the
            request was redirected to another origin.
    """


class AsyncIdempotentClient(AsyncSending, httpx.AsyncClient):
    """The same as :class:`IdempotentClient`, on ``httpx.AsyncClient``."""
