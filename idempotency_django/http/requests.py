"""The types of the requests that protected views get, for annotations.

They exist for type checkers: at run time, requests have Django's or REST framework's own classes,
and ``request.idempotency`` is added to them. :mod:`idempotency_django.drf` has the same two for
REST framework.
"""

from __future__ import annotations

from django.http import HttpRequest

from ..engine.context import ExecutionContext


class OptionallyIdempotentRequest(HttpRequest):
    """A request to a protected view whose key is optional.

    Attributes:
        idempotency: the attempt that runs. It is false where the request has no key, or takes no
            part: ``None``, or in a leased view an object that says what is missing.
    """

    idempotency: ExecutionContext | None


class IdempotentRequest(OptionallyIdempotentRequest):
    """A request to a protected view that always has a key: its policy requires or derives one.

    ::

        @idempotent(required=True, mode="leased")
        def pay(request: IdempotentRequest) -> HttpResponse:
            charge_id = request.idempotency.step("charge", charge)

    Attributes:
        idempotency: the attempt that runs.
    """

    idempotency: ExecutionContext
