"""The reference app's webhooks: stored at once, handled in the background, one effect each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from idempotency_django.contrib.messaging import StandardWebhooks, Stripe, Verifier
from idempotency_django.testing import eventually
from testproject import settings
from testproject.server import ROOT

from .clients import Api, Order
from .conftest import Server

pytestmark = pytest.mark.e2e

VERIFIERS: dict[str, Verifier] = {
    "standard": StandardWebhooks([settings.WEBHOOK_SECRET]),
    "stripe": Stripe([settings.STRIPE_WEBHOOK_SECRET]),
}
senders = pytest.mark.parametrize("sender", VERIFIERS)


def body_of(sender: str, order: Order, **changes: Any) -> bytes:
    """What the sender sends about an order."""
    asked = {"reference": order.reference, **changes}
    if sender == "standard":
        return json.dumps({"type": "order.paid", "data": asked}).encode()
    data = {"object": {"id": "in_1", "object": "invoice", "metadata": asked}}
    event = {"id": f"evt_{order.key}", "object": "event", "type": "invoice.paid", "data": data}
    return json.dumps(event).encode()


@pytest.fixture
def deliver(server: Server, api: Api) -> Callable[..., httpx.Response]:
    """Delivers a webhook about an order."""

    def deliver(sender: str, order: Order, body: bytes = b"", **headers: str) -> httpx.Response:
        body = body or body_of(sender, order)
        signed = VERIFIERS[sender].sign(body, message_id=f"msg_{order.key}")
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return api.send(
            f"/webhooks/{sender}/",
            order,
            content=body,
            headers={"Content-Type": "application/json", **signed, **named},
        )

    return deliver


@senders
def test_one_effect(api: Api, deliver: Any, sender: str) -> None:
    """A webhook that is delivered three times has one effect."""
    order = Order()
    assert [deliver(sender, order).status_code for _ in range(3)] == [200] * 3
    eventually(lambda: api.effects(order, "webhook") == 1)
    assert deliver(sender, order).status_code == 200
    other = Order()  # once it has its effect, the first one had every chance of a second
    deliver(sender, other)
    eventually(lambda: api.effects(other, "webhook") == 1)
    assert api.effects(order) == 1


@senders
def test_refused(api: Api, deliver: Any, sender: str) -> None:
    """What is not signed with the secret is refused and has no effect, whatever it is."""
    order, other = Order(), Order()
    signature = {"standard": "webhook_signature", "stripe": "Stripe_Signature"}[sender]
    for value in ("", "v1,AAAA", "t=1,v1=00", "?"):
        assert deliver(sender, order, **{signature: value}).status_code == 401
    for body in (b"", b"\xff", b"{}"):
        unsigned = api.send(f"/webhooks/{sender}/", order, content=body, headers={})
        assert unsigned.status_code == 401
    deliver(sender, other)
    eventually(lambda: api.effects(other) == 1)
    assert api.effects(order) == 0


def test_fails_and_recovers(api: Api, server: Server, deliver: Any) -> None:
    """A message whose handler fails stays in the inbox, and an operator retries it."""
    order = Order()
    deliver("standard", order, body_of("standard", order, amount="much"))
    inbox = "from idempotency_django.contrib.messaging.models import InboxMessage as M\n"
    mine = f"m = M.objects.get(message_id='msg_{order.key}')\n"
    eventually(lambda: _says(server, f"{inbox}{mine}print(bool(m.error))") == "True")
    assert api.effects(order) == 0
    body = body_of("standard", order)
    fixed = f"m.body = {body!r}; m.save(update_fields=['body'])\n"  # nobody sends it again
    settle = "from idempotency_django.contrib.messaging import settling\n"
    now = "m.refresh_from_db(); m.state == 'pending' and settling.retry(m, by='ann')"
    server.shell(f"{inbox}{settle}{mine}{fixed}{now}")
    eventually(lambda: api.effects(order) == 1)


def _says(server: Server, code: str) -> str:
    """What a shell prints."""
    done = subprocess.run(
        [sys.executable, "-m", "testproject.manage", "shell", "-v0", "-c", code],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={
            **os.environ,
            "DATABASE_URL": server.database.url,
            "DJANGO_SETTINGS_MODULE": "testproject.settings",
        },
    )
    return done.stdout.strip()


def test_command_ends(server: Server) -> None:
    """process_inbox ends on SIGTERM, in good order."""
    process = subprocess.Popen(
        [sys.executable, "-m", "testproject.manage", "process_inbox", "--poll", "30"],
        cwd=ROOT,
        env={
            **os.environ,
            "DATABASE_URL": server.database.url,
            "DJANGO_SETTINGS_MODULE": "testproject.settings",
        },
    )
    handled = f"/proc/{process.pid}/status"

    def catches_sigterm() -> bool:
        with open(handled) as status:  # noqa: PTH123
            caught = next(line for line in status if line.startswith("SigCgt"))
        return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)

    try:
        eventually(catches_sigterm)
        process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
