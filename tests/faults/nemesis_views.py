"""What clients ask for while a nemesis is about: the bank's operations, and some worse ones."""

from __future__ import annotations

from django.http import HttpRequest, JsonResponse
from django.urls import include, path

from idempotency_django.decorators import idempotent

from .bank.views import enter, fail_if_asked, reference_of


@idempotent(mode="leased")
def outside(request: HttpRequest) -> JsonResponse:
    """The effect is at the ledger, which honours a derived key; for stores without steps."""
    execution = request.idempotency  # type: ignore[attr-defined]
    entry = enter(execution.derive_key("entry"), reference_of(request))
    fail_if_asked(request)
    return JsonResponse({"entry": entry}, status=201)


urlpatterns = [
    path("outside/", outside),
    path("", include("tests.faults.bank.views")),
]
