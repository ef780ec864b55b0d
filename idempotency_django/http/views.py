"""The status view for plain Django; :mod:`idempotency_django.drf` has one for REST framework."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, JsonResponse
from django.http.response import HttpResponseBase
from django.utils.decorators import method_decorator
from django.views.decorators.cache import never_cache
from django.views.generic import View

from .invocations import callers_of
from .status import describe_operation, record_of


@method_decorator(never_cache, name="dispatch")
class IdempotencyStatusView(View):
    """Tells the caller of an operation its status, as JSON.

    The ``Location`` of a 202 leads here, with ``on_conflict="accepted"``::

        path("operations/<str:token>/", IdempotencyStatusView.as_view(), name="idempotency-status")

    Other callers get 404. See :func:`idempotency_django.http.status.describe_operation`.
    """

    http_method_names = ["get", "head", "options"]

    def get(self, request: HttpRequest, token: str, *args: Any, **kwargs: Any) -> HttpResponseBase:
        callers = callers_of(request, getattr(request, "user", None))
        return JsonResponse(describe_operation(record_of(token, callers)))
