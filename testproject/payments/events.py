"""Events: a consumer, driven over HTTP by authenticated senders.

A queue would drive it in the same way: read the event, hand it over, acknowledge what was handled.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from django.contrib.auth.models import User
from django.http import HttpRequest, JsonResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST
from rest_framework.exceptions import ValidationError

from idempotency_django.contrib.messaging import Consumer, Event, Handled
from idempotency_django.decorators import idempotency_exempt
from idempotency_django.errors import IdempotencyError
from idempotency_django.policy import Policy

from .auth import token_required
from .effects import make, understood
from .faults import Faults
from .models import Kind

DEFAULTS = {"amount": 100, "currency": "EUR"}

ledger = Consumer("ledger", policy=Policy(store="database"))

_request: ContextVar[HttpRequest] = ContextVar("request")  # whose faults are simulated


@ledger.on("order.paid", "order.refunded", "invoice.paid")
def book(event: Event) -> dict[str, Any]:
    """Make the effect that the event's data asks for."""
    request = _request.get()
    request.user = User.objects.get(username=event.source)
    Faults(request).sleep()
    return make(request, Kind.EVENT, _asked(event))["body"]


@csrf_exempt
@require_POST
@token_required
@idempotency_exempt  # the event has an id of its own
def receive(request: HttpRequest) -> JsonResponse:
    """Hand over the event in the request, and respond when what it did is committed."""
    _request.set(request)
    try:
        # The source is who has sent it, not who it says: no sender gets another one's result.
        event = replace(Event.from_json(request.body), source=request.user.get_username())
        if ledger.handles(event.type):
            _asked(event)  # or it would fail until it is dead-lettered
        outcome = ledger.handle(event)
    except IdempotencyError as error:
        return _refused(error, error.status)
    except ValidationError as error:
        return JsonResponse({"detail": error.detail}, status=400)
    except ValueError as error:
        return _refused(error, 400)
    told = "handled" if isinstance(outcome, Handled) else "duplicate"
    return JsonResponse({"outcome": told, "result": outcome.result})


def _asked(event: Event) -> Any:
    data = event.data if isinstance(event.data, dict) else {}
    return understood({**DEFAULTS, **data})


def _refused(error: Exception, status: int) -> JsonResponse:
    return JsonResponse({"detail": str(error)}, status=status)
