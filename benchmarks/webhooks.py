"""Webhooks: how long a sender waits for the response, whatever the handler does."""

# the page says × and ≤
from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from itertools import count
from statistics import quantiles
from typing import Any, Final

from django.conf import settings
from django.dispatch import receiver
from django.http import HttpResponse
from django.test import RequestFactory
from djstripe import signals
from djstripe.models import Account, APIKey, WebhookEndpoint
from djstripe.views import ProcessWebhookView

from benchmarks.models import Order
from benchmarks.report import Section, Table, Target
from benchmarks.timing import Block, Measured, Sample, interleave
from idempotency_django.contrib.messaging import Stripe, WebhookReceiver, process_due

SECRET: Final = "whsec_benchmarks"
SLOW: Final = 0.1  # seconds
SAME: Final = 1.5  # times as long as with a handler that takes no time, at most
SHARE: Final = 0.25  # of what dj-stripe takes, at most

OURS: Final = "`WebhookReceiver`, a handler that takes no time"
OURS_SLOW: Final = "`WebhookReceiver`, a handler of 100 ms"
PEER: Final = "dj-stripe, a handler that takes no time"
PEER_SLOW: Final = "dj-stripe, a handler of 100 ms"

TEXT: Final = """\
A signed event of Stripe is delivered to the view, in the process of the benchmark. The handler
creates one row. {rounds} interleaved rounds of {calls} deliveries each; the numbers are the medians
of the rounds' 95th percentiles. dj-stripe calls its handlers before it responds."""

_numbers = count()
_slowness = [0.0]


class Hook(WebhookReceiver):
    """The receiver of the benchmark."""

    source = "benchmark"
    verifier = Stripe([SECRET])


def handle(*_: Any, **__: Any) -> None:
    """What both sides do."""
    time.sleep(_slowness[0])
    Order.objects.create(reference="webhook", amount=1, currency="EUR")


@Hook.on("application_fee.created")
def created(event: Any, execution: Any) -> None:
    handle()


receiver(signals.WEBHOOK_SIGNALS["application_fee.created"])(handle)


def measure(rounds: int, calls: int) -> Section:
    """Compare how long senders wait."""
    endpoint = _endpoint()
    ours, theirs = Hook.as_view(), ProcessWebhookView.as_view()

    def peer(request: Any) -> Any:
        return theirs(request, uuid=endpoint.djstripe_uuid)

    measured = interleave(
        {
            OURS: _block(ours, calls, 0),
            OURS_SLOW: _block(ours, calls, SLOW),
            PEER: _block(peer, calls, 0),
            PEER_SLOW: _block(peer, calls, SLOW),
        },
        rounds,
    )
    same = _over(measured, OURS_SLOW, OURS)
    share = _over(measured, OURS_SLOW, PEER_SLOW)
    table = Table(["", "ms until the response (p95)", "× `WebhookReceiver` without delay"])
    for name, each in measured.items():
        table.add(name, f"{each.wall.milliseconds:.2f}", each.wall.over(measured[OURS].wall))
    return Section(
        "Webhooks",
        [TEXT.format(rounds=rounds, calls=calls), table],
        [
            Target(
                f"p95 with a handler of 100 ms: {same:.2f} ≤ {SAME} × without one", same <= SAME
            ),
            Target(
                f"p95 with a handler of 100 ms: {share:.2f} ≤ {SHARE} × dj-stripe's", share <= SHARE
            ),
        ],
    )


def _endpoint() -> WebhookEndpoint:
    """Where Stripe delivers to, of an account that is known, so that nobody asks Stripe."""
    account, _ = Account.objects.get_or_create(id="acct_1")
    secret = settings.STRIPE_TEST_SECRET_KEY
    key = {"type": "secret", "livemode": False, "djstripe_owner_account": account}
    APIKey.objects.update_or_create(secret=secret, defaults=key)
    endpoint, _ = WebhookEndpoint.objects.get_or_create(
        id="we_1",
        defaults={
            "djstripe_owner_account": account,
            "enabled_events": ["*"],
            "djstripe_validation_method": "verify_signature",
            "livemode": False,
            "secret": SECRET,
            "status": "enabled",
            "url": "https://example.com/",
        },
    )
    return endpoint


def _over(measured: dict[str, Measured], one: str, other: str) -> float:
    return measured[one].wall.over(measured[other].wall).value


def _block(view: Callable[[Any], Any], calls: int, slowness: float) -> Block:
    """Deliveries of new events, of which the 95th percentile is kept."""

    def block() -> Iterator[Sample]:
        _slowness[0] = slowness
        taken = []
        for _ in range(calls):
            request = _delivery()
            started = time.perf_counter()
            response: HttpResponse = view(request)
            taken.append(time.perf_counter() - started)
            assert response.status_code == 200, response.content
        yield Sample(quantiles(taken, n=20)[-1])
        _slowness[0] = 0.0
        process_due()

    return block


def _delivery() -> Any:
    event = {
        "id": f"evt_{uuid.uuid4().hex}",
        "object": "event",
        "type": "application_fee.created",
        "api_version": "2024-06-20",
        "created": int(time.time()),
        "livemode": False,
        "pending_webhooks": 1,
        "request": {"id": None, "idempotency_key": None},
        "data": {"object": {"id": f"fee_{next(_numbers)}", "object": "application_fee"}},
    }
    body = json.dumps(event).encode()
    return RequestFactory().post(
        "/webhooks/",
        body,
        content_type="application/json",
        headers=Hook.verifier.sign(body),
    )
