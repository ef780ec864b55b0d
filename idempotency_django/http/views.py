"""The status view for plain Django; :mod:`idempotency_django.drf` has one for REST framework."""

from __future__ import annotations

from typing import Any

from django.http import Http404, HttpRequest, JsonResponse
from django.http.response import HttpResponseBase
from django.utils.decorators import method_decorator
from django.views.decorators.cache import never_cache
from django.views.generic import View

from ..errors import KeyMalformed
from .messages import callers_of, problem_response
from .status import status_for


@method_decorator(never_cache, name="dispatch")
class IdempotencyStatusView(View):
    """Tells the caller of an operation its status, as JSON.

    The ``Location`` of a 202 leads here, with ``on_conflict="accepted"``::

        path("operations/<str:token>/", IdempotencyStatusView.as_view(), name="idempotency-status")

    A URL without a token is asked for a key, ``?key=…``, and lists the caller's own operations with
    it, as far as they are in a database::

        path("operations/", IdempotencyStatusView.as_view())

    Other callers get 404, or an empty list; a key that is missing or malformed gets 400. See
    :func:`idempotency_django.http.status.describe_operation`.
    """

    http_method_names = ["get", "head", "options"]

    def get(
        self, request: HttpRequest, token: str = "", *args: Any, **kwargs: Any
    ) -> HttpResponseBase:
        callers = callers_of(request, getattr(request, "user", None))
        try:
            shown = status_for(callers, token, request.GET.get("key", ""))
        except KeyMalformed as error:
            return problem_response(error)
        if shown is None:
            raise Http404
        return JsonResponse(shown)
