"""The status of an operation: the 202 of a duplicate, and the view that its address leads to.

The address names the operation in a signed token, which no client can change or make up. The view
says how far the operation is, and nothing else. Its response is for who sends the request again:
that passes every check.
"""

from __future__ import annotations

import json
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.core.signing import BadSignature, Signer
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.urls import NoReverseMatch, reverse
from django.utils.decorators import method_decorator
from django.views.decorators.cache import never_cache
from django.views.generic import View

from ..conf import conf
from ..engine import Plan
from ..errors import IdempotencyError
from ..stores import stores
from ..stores.records import Payload, Status
from .responses import problem_response, retry_after

STATUS_VIEW: Final = "idempotency-status"
"""The name of the status view's URL."""

SALT: Final = "idempotency_django.http.status"


def accepted_payload(plan: Plan) -> Payload:
    """The response to a duplicate of an operation in progress: 202, and where its status is.

    Raises:
        ImproperlyConfigured: the project's URLs have no status view.
    """
    operation = plan.operation
    named = [plan.store.alias, operation.key, operation.scope]
    headers = {
        "Content-Type": "application/json",
        "Location": status_url(Signer(salt=SALT).sign_object(named)),
        "Retry-After": str(retry_after()),
        "Cache-Control": "no-store",
    }
    return Payload(202, tuple(headers.items()), json.dumps({"status": Status.IN_PROGRESS}).encode())


def status_url(token: str) -> str:
    """The path of the status view for a token.

    Raises:
        ImproperlyConfigured: the project's URLs have no status view.
    """
    try:
        return reverse(STATUS_VIEW, args=[token])
    except NoReverseMatch as error:
        raise ImproperlyConfigured(
            "An idempotency policy has on_conflict='accepted', but no URL is named "
            f"{STATUS_VIEW!r}. Add path('operations/<str:token>/', "
            f"IdempotencyStatusView.as_view(), name={STATUS_VIEW!r}) to the project's URLs."
        ) from error


@method_decorator(never_cache, name="dispatch")
class IdempotencyStatusView(View):
    """Tells how far an operation is, as JSON.

    The ``Location`` of a 202 leads here, with ``on_conflict="accepted"``::

        path("operations/<str:token>/", IdempotencyStatusView.as_view(), name="idempotency-status")

    The status is ``in_progress``, ``interrupted`` (a retry resumes it), ``held`` (an operator must
    settle it), ``completed`` (a retry gets the response) or ``failed`` (a retry is a new attempt).
    """

    http_method_names = ["get", "head", "options"]

    def get(self, request: HttpRequest, token: str, *args: Any, **kwargs: Any) -> HttpResponse:
        try:
            alias, key, scope = Signer(salt=SALT).unsign_object(token)
        except BadSignature:
            raise Http404 from None
        try:
            record = stores[alias].get(key, scope) if alias in conf.stores else None
        except IdempotencyError as error:
            return problem_response(error)
        if record is None or record.expired:
            raise Http404
        status = str(record.status)
        if record.interrupted:
            status = "held" if record.held else "interrupted"
        return JsonResponse({"status": status, "attempt": record.attempt})
