"""The greeting of the reference app, on the page ``/`` and at its start."""

from __future__ import annotations

from uuid import uuid4

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_safe

GREETING = """\
This is the reference app of idempotency_django. Send a charge; then send the same again:

  {charge}

The second response is the first one, with "Idempotent-Replayed: true". It was charged once:

  {count}

Each of these takes a POST like that one, as alice (alice-token) or bob (bob-token):

  /api/charges/         Django REST framework with the mixin; the key is required
  /api/orders/          Django REST framework with the mixin; the key is optional
  /api/viamiddleware/   Django REST framework without the mixin; the middleware protects it
  /api/transfers/       three steps, including a call to an external service
  /api/payouts/         long work: a duplicate gets 202 and the address of the status
  /api/unprotected/     no protection at all
  /api/events/          a consumer: POST a CloudEvent of the type order.paid instead
  /api/jobs/            enqueues a Celery task once; see BROKER_URL in testproject/settings.py
  /api/published/       an outbox: another process gets a message of it, once it is committed
  /plain/orders/        a Django view, which the middleware protects
  /decorated/orders/    a Django view with the decorator
  /async/orders/        an async Django view with the decorator
  /v1/charges           for Stripe's own clients, with DIALECT=stripe: stripe.StripeClient(…)
  /webhooks/standard/   a webhook, signed as Standard Webhooks with WEBHOOK_SECRET
  /webhooks/stripe/     a webhook, signed as Stripe's with STRIPE_WEBHOOK_SECRET
  /api/invoices/        versions: only who has read an invoice's last version can change it
  /api/payments/        one payment per order, whatever the key: {{"order": "…", "amount": 500}}

A webhook is stored, and handled in the background. These secrets sign it:

  WEBHOOK_SECRET={webhook_secret}
  STRIPE_WEBHOOK_SECRET={stripe_secret}

Its body names what is made. Without a reference, the handler fails, and the message is tried again:

  /webhooks/standard/   {{"type": "paid", "data": {{"reference": "w-1"}}}}
  /webhooks/stripe/     {{"id": "evt_1", "type": "paid",
                         "data": {{"object": {{"metadata": {{"reference": "w-1"}}}}}}}}

An operation that takes long: start the server with SIMULATE=1, send this, and send it again from
another terminal while it is running. The second response is 202, with the address of the status:

  {slow}

An invoice has a version, which is in its ETag. Create one, and change it: the number of the invoice
stands for ID. Without If-Match the change is refused (428), and with an old ETag as well (412):

  {invoice}

  {change}

A POST to /api/invoices/ID/pay/ pays it once, and to /api/invoices/ID/cancel/ cancels it.

What became of them is at {address}/admin/ (admin, password admin).
"""

_POST = (
    "curl -i {method}{address}{path} "
    "-H 'Authorization: Token alice-token' "
    "-H 'Content-Type: application/json' "
    "-H 'Idempotency-Key: \"{key}\"' "
    '-d \'{{"reference": "{reference}", "amount": 500, "currency": "EUR"}}\''
)
_COUNT = "curl '{address}/effects/?reference={reference}'"


def greeting(address: str) -> str:
    """The greeting of the server at an address, ``http://127.0.0.1:8000``."""
    reference = _new_reference()
    slow = _post(address, "/api/payouts/", _new_reference())
    return GREETING.format(
        address=address,
        charge=_post(address, "/api/charges/", reference),
        count=_COUNT.format(address=address, reference=reference),
        invoice=_post(address, "/api/invoices/", reference),
        change=_post(address, "/api/invoices/ID/", reference, "-X PUT -H 'If-Match: \"ID.1\"' "),
        webhook_secret=settings.WEBHOOK_SECRET,
        stripe_secret=settings.STRIPE_WEBHOOK_SECRET,
        slow=f"{slow} -H 'X-Simulate: sleep-ms=20000'",
    )


def charge_command(address: str) -> str:
    """The command that sends a new charge there, in one line for a shell."""
    return _post(address, "/api/charges/", _new_reference())


def _post(address: str, path: str, reference: str, method: str = "") -> str:
    return _POST.format(address=address, path=path, key=uuid4(), reference=reference, method=method)


def _new_reference() -> str:
    """One that nothing has been charged for yet: the database outlives the server."""
    return f"order-{uuid4().hex[:8]}"


@require_safe
def index(request: HttpRequest) -> HttpResponse:
    """List the endpoints to try."""
    address = request.build_absolute_uri("/").rstrip("/")
    return HttpResponse(greeting(address), content_type="text/plain; charset=utf-8")
