"""Views that tests share: each makes an effect, and does what a test asks for meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from asgiref.sync import sync_to_async
from django.http import HttpRequest, HttpResponse, JsonResponse
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from idempotency_django.drf import IdempotentViewMixin
from tests.models import Effect

_meanwhile: dict[str, Callable[[], object]] = {}


@contextmanager
def during(function: Callable[[], object], reference: str = "a") -> Iterator[None]:
    """What happens while the view that is given this reference runs, once."""
    _meanwhile[reference] = function
    try:
        yield
    finally:
        left = _meanwhile.pop(reference, None)
    assert left is None, "The view did not run."


def create(request: HttpRequest) -> HttpResponse:
    """Make an effect. The reference ``error`` raises, and one of digits is the status."""
    reference = json.loads(request.body)["reference"]
    Effect.objects.create(reference=reference)
    if reference in _meanwhile:
        _meanwhile.pop(reference)()
    if reference == "error":
        raise LookupError("boom")
    status = int(reference) if reference.isdigit() else 201
    return JsonResponse({"reference": reference}, status=status, headers={"Location": "/e/1"})


async def acreate(request: HttpRequest) -> HttpResponse:
    return await sync_to_async(create)(request)


class DRF(APIView):
    """The same, of REST framework."""

    authentication_classes: ClassVar[list[Any]] = []

    def post(self, request: Request) -> Response:
        made = create(request._request)
        return Response(json.loads(made.content), status=made.status_code)


class Mixed(IdempotentViewMixin, DRF):
    """The same, protected by the mixin."""
