"""The status view for plain Django; :mod:`idempotency_django.drf` has one for REST framework."""

from __future__ import annotations

from typing import Any

from django.http import Http404, HttpRequest, JsonResponse
from django.http.response import HttpResponseBase
from django.utils.decorators import method_decorator
from django.views.decorators.cache import never_cache
from django.views.generic import View

from .messages import authorization_of, principal_of
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
        caller = principal_of(getattr(request, "user", None))
        record = record_of(token, caller, authorization_of(request))
        if record is None:
            raise Http404
        return JsonResponse(describe_operation(record))
