"""What the reference app says of itself, on the page ``/`` and when it starts."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_safe

GREETING = """\
This is the reference app of idempotency_django. Send a charge; then send the same again:

  {charge}

The second answer is the first one, with "Idempotent-Replayed: true". It was charged once:

  {count}

Each of these takes a POST like that one, as alice (alice-token) or bob (bob-token):

  /api/charges/         Django REST framework with the mixin; the key is required
  /api/orders/          Django REST framework with the mixin; the key is optional
  /api/viamiddleware/   Django REST framework without the mixin; the middleware protects it
  /api/transfers/       three steps, of which one is a call to somebody else
  /api/payouts/         long work: a duplicate gets 202 and the address of the status
  /api/unprotected/     no protection at all
  /plain/orders/        a Django view, which the middleware protects
  /decorated/orders/    a Django view with the decorator
  /async/orders/        an async Django view with the decorator

What became of them is at {address}/admin/ (admin, password admin).
"""

_CHARGE = (
    "curl -i {address}/api/charges/ "
    "-H 'Authorization: Token alice-token' "
    "-H 'Content-Type: application/json' "
    "-H 'Idempotency-Key: \"8e03978e-40d5-43dd-bc93-6894a57f9324\"' "
    '-d \'{{"reference": "order-17", "amount": 500, "currency": "EUR"}}\''
)
_COUNT = "curl '{address}/effects/?reference=order-17'"


def greeting(address: str) -> str:
    """The greeting of the server at an address, ``http://127.0.0.1:8000``."""
    commands = {"charge": charge_command(address), "count": _COUNT.format(address=address)}
    return GREETING.format(address=address, **commands)


def charge_command(address: str) -> str:
    """The command that sends a charge there, in one line for a shell."""
    return _CHARGE.format(address=address)


@require_safe
def index(request: HttpRequest) -> HttpResponse:
    """What can be tried here."""
    address = request.build_absolute_uri("/").rstrip("/")
    return HttpResponse(greeting(address), content_type="text/plain; charset=utf-8")
