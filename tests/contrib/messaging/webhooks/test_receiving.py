"""Receiving: what is verified is committed before the response; nothing else is stored, ever."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.db import OperationalError, connections, transaction
from django.test import Client, RequestFactory, override_settings

from idempotency_django.checks import inventory
from idempotency_django.contrib.messaging import (
    StandardWebhooks,
    Stripe,
    process_due,
)
from idempotency_django.contrib.messaging import inbox as receiving
from idempotency_django.contrib.messaging.inbox import (
    _RECEIVERS,
    WebhookReceiver,
    check_receivers,
    receivers,
)
from idempotency_django.policy import Policy
from idempotency_django.testing import in_threads
from tests.contrib.messaging.settling import settle

from .conftest import Inbox
from .receivers import SECRETS, GitHubHook, Hook, StripeHook, behaviour, body_of, deliver

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")


def test_stored(inbox: Inbox) -> None:
    """A delivery is stored as it came, without credentials, and gets 200."""
    secret = {"Cookie": "sessionid=1", "Authorization": "Basic x", "X-Other": "é"}
    body = body_of(n=7)
    response = deliver(Hook, "m-1", body, headers=secret)
    assert (response.status_code, response.content) == (200, b"")
    [row] = inbox.rows()
    assert (row.source, row.message_id, row.type) == ("shop", "m-1", "order.paid")
    assert (bytes(row.body), row.state, row.attempts) == (body, "pending", 0)
    assert row.process_after == row.received_at
    headers = {name.lower(): value for name, value in json.loads(row.headers)}
    assert headers["webhook-id"] == "m-1"
    assert not {"cookie", "authorization"} & {*headers}


class TestOtherBodies:
    """A known id with another body is no redelivery."""

    def test_refused(self, inbox: Inbox, caplog: pytest.LogCaptureFixture) -> None:
        """It is refused each time, with an error in the log, and stored nowhere."""
        statuses = [deliver(Hook, "m-1", body_of(n=n)).status_code for n in (1, 2, 1, 2, 3)]
        assert statuses == [200, 422, 200, 422, 422]
        assert deliver(Hook, "m-1", body_of(n=2)).json()["type"].endswith("mismatch")
        [row] = inbox.rows()
        assert (json.loads(bytes(row.body))["n"], row.state) == (1, "pending")
        errors = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
        assert len(errors) == 4
        assert "'m-1' came before with another body" in errors[0]

    def test_race(self, inbox: Inbox) -> None:
        """Of ten bodies at once under one id, one is handled and nine are refused."""
        sent = [lambda n=n: deliver(Hook, "m-1", body_of(n=n)).status_code for n in range(10)]
        assert sorted(in_threads(sent)) == [200] + [422] * 9
        assert inbox.states() == ["pending"]

    def test_what_stripe_changes(self, inbox: Inbox) -> None:
        """Stripe says in each delivery how many others are pending, which makes no other event."""
        for pending in (2, 1, 1):
            event = body_of("invoice.paid", id="evt_1", pending_webhooks=pending)
            assert deliver(StripeHook, body=event).status_code == 200
        assert inbox.states() == ["pending"]
        other = body_of("invoice.paid", id="evt_1", pending_webhooks=1, data=2)
        assert deliver(StripeHook, body=other).status_code == 422
        assert inbox.states() == ["pending"]


def test_race(inbox: Inbox) -> None:
    """Thirty deliveries at once, of three messages: all get 200, and three are stored."""
    sent = [lambda n=n: deliver(Hook, f"m-{n % 3}").status_code for n in range(30)]
    assert in_threads(sent) == [200] * 30
    assert inbox.states() == ["pending"] * 3


def test_statements(inbox: Inbox, django_assert_num_queries: Any) -> None:
    """Receiving takes one statement, and a second one for a duplicate: is its body the same?"""
    for statements in (1, 2, 2):
        with django_assert_num_queries(statements, using=inbox.alias):
            deliver(Hook)


def test_ids(inbox: Inbox) -> None:
    """Ids that no column could hold are stored as their digest, and no two are confused."""
    for message_id in ("a b", "a  b", "ü", "x" * 999):
        assert deliver(Hook, message_id).status_code == 200
        assert deliver(Hook, message_id).status_code == 200
    assert inbox.rows().count() == 4
    assert process_due() == {"done": 4}


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"webhook-signature": "v1,AAAA"}, None, 401),
        (None, body_of("x" * 256), 400),
        (None, body_of("order\0paid"), 400),
    ],
)
def test_refused(inbox: Inbox, headers: Any, body: Any, status: int) -> None:
    """What is not verified, or not understood, is refused in words, and nothing is stored."""
    response = deliver(Hook, "m-1", body, headers=headers)
    assert response.status_code == status
    assert response["Content-Type"] == "application/problem+json"
    assert response.json()["type"].endswith("delivery-refused")
    assert inbox.rows().count() == 0


@pytest.mark.parametrize("depth", [99, 101, 600, 5_000])
def test_nested(inbox: Inbox, depth: int) -> None:
    """What is nested more deeply than the data of a message may be is not taken for JSON."""
    body = b'{"type": "order.paid", "n": ' + b"[" * depth + b"]" * depth + b"}"
    assert deliver(Hook, "m-1", body).status_code == 200
    assert process_due() == {"done" if depth < 100 else "discarded": 1}
    assert deliver(StripeHook, body=b'{"id": "evt_1",' + body[1:]).status_code == (
        200 if depth < 100 else 400
    )


def test_no_id(inbox: Inbox) -> None:
    """A signed delivery without an id is refused: nobody could tell it from another."""
    assert deliver(StripeHook, body=b'{"type": "invoice.paid"}').status_code == 400
    assert deliver(GitHubHook, "").status_code == 400
    assert inbox.rows().count() == 0


def test_no_secret(
    inbox: Inbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While no secret can be used, the sender gets 500, and delivers again; the log says why."""
    logging.getLogger("django.request").setLevel(logging.NOTSET)
    monkeypatch.setattr(Hook.verifier, "_secrets", list)
    good = StandardWebhooks(SECRETS[:1]).sign(body_of(), message_id="m-1")
    monkeypatch.setattr(Hook.verifier, "sign", lambda *_, **__: good)
    assert deliver(Hook, client=Client(raise_request_exception=False)).status_code == 500
    assert "has no list of secrets" in caplog.text
    assert inbox.rows().count() == 0


def test_large(inbox: Inbox) -> None:
    """A body is not read beyond Django's limit."""
    with override_settings(DATA_UPLOAD_MAX_MEMORY_SIZE=10):
        assert deliver(Hook).status_code == 400
    assert inbox.rows().count() == 0


def test_body_was_read(inbox: Inbox) -> None:
    """A middleware that has read the body or the form is in nobody's way."""
    for read in ("body", "POST"):
        body = body_of(read=read)
        request = RequestFactory().post(
            "/webhooks/shop/",
            body,
            content_type="application/x-www-form-urlencoded",
            headers=Hook.verifier.sign(body, message_id=read),
        )
        getattr(request, read)
        assert Hook.as_view()(request).status_code == 200
    assert inbox.rows().count() == 2


def test_csrf_and_middleware(inbox: Inbox, settings: Any) -> None:
    """Neither the CSRF middleware nor ours is in the way, nor a policy that requires keys."""
    ours = "idempotency_django.middleware.IdempotencyMiddleware"
    settings.MIDDLEWARE = ["django.middleware.csrf.CsrfViewMiddleware", ours]
    settings.IDEMPOTENCY = {**settings.IDEMPOTENCY, "POLICY": {"required": True}}
    assert deliver(Hook, client=Client(enforce_csrf_checks=True)).status_code == 200
    assert process_due() == {"done": 1}
    hows = {endpoint.route: endpoint.how for endpoint in inventory.endpoints()}
    assert {how for route, how in hows.items() if "webhooks" in route} == {"inbox"}


def test_atomic_requests(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under ATOMIC_REQUESTS the message is committed by itself."""
    for connection in connections.all():
        monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
    assert deliver(Hook).status_code == 200
    assert inbox.states() == ["pending"]


def test_within_a_transaction(inbox: Inbox) -> None:
    """Within a transaction nothing is stored: the sender would be told too early."""
    client = Client(raise_request_exception=True)
    with (
        pytest.raises(ImproperlyConfigured, match="must commit on its own"),
        transaction.atomic(using=inbox.alias),
    ):
        deliver(Hook, client=client)
    connection = connections[inbox.alias]
    connection.set_autocommit(False)
    try:
        with pytest.raises(ImproperlyConfigured, match="AUTOCOMMIT"):
            deliver(Hook, client=client)
    finally:
        connection.rollback()
        connection.set_autocommit(True)
    assert inbox.rows().count() == 0


def test_database_down(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the database cannot be reached, the sender gets 503 and may deliver again."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OperationalError("connection refused")

    connections[inbox.alias].close()
    monkeypatch.setattr(type(connections[inbox.alias]), "get_new_connection", refuse)
    response = deliver(Hook)
    assert (response.status_code, response["Retry-After"]) == (503, "30")
    assert response.json()["type"].endswith("store-unavailable")
    monkeypatch.undo()
    assert deliver(Hook).status_code == 200
    assert inbox.states() == ["pending"]


def test_command(inbox: Inbox, capsys: pytest.CaptureFixture[str]) -> None:
    """The command says what it has done; what failed is tried again, and not merely "pending"."""

    def fail(event: Any, execution: Any) -> None:
        raise ConnectionError

    deliver(Hook)
    call_command("run_messaging", "--once")
    behaviour["shop"] = fail
    deliver(Hook, "m-2")
    call_command("run_messaging", "--once")
    said = "Messages: 1 done.\nMessages: 1 failed or waiting, to be retried.\n"
    assert capsys.readouterr().out == said


class TestUnsignedIds:
    """GitHub's signature does not cover the id of a delivery."""

    push = {"headers": {"X-GitHub-Event": "push"}}

    def test_replay_is_refused(self, inbox: Inbox, caplog: pytest.LogCaptureFixture) -> None:
        """The same body under another id is refused, and so is a known id with another body."""

        def status(message_id: str, number: int) -> int:
            body = body_of(n=number)
            return int(deliver(GitHubHook, message_id, body, **self.push).status_code)

        assert [status(each, 1) for each in ("m-1", "m-1", "m-2", "m-1")] == [200, 200, 422, 200]
        [error] = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
        assert "'m-2' has the body of the message 'm-1'" in error
        assert (status("m-4", 4), status("m-4", 5), status("m-4", 1)) == (200, 422, 422)
        assert inbox.states() == ["pending", "pending"]
        assert process_due() == {"done": 2}
        assert inbox.effects() == ["github m-1", "github m-4"]
        settle(inbox.row("m-1"), "repeat", by="ann")  # "m-2" was genuine, too
        assert process_due() == {"done": 1}
        assert inbox.effects() == ["github m-1", "github m-4", "github m-1"]

    def test_race(self, inbox: Inbox) -> None:
        """Of ten at once with one body, one is handled and nine are refused."""
        sent = [lambda n=n: deliver(GitHubHook, f"m-{n}", **self.push) for n in range(10)]
        statuses = sorted(response.status_code for response in in_threads(sent))
        assert statuses == [200] + [422] * 9
        assert inbox.states() == ["pending"]


class TestDeclaring:
    """What a receiver cannot be declared with is refused where it is."""

    def test_source(self) -> None:
        """A source that no record could hold is refused."""
        with pytest.raises(ValueError, match="'a b' is not a valid name"):
            type("Bad", (WebhookReceiver,), {"source": "a b"})

    def test_handlers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Handlers are those of a consumer; one for "*" gets what has no other."""
        monkeypatch.setattr(receiving, "_RECEIVERS", {})
        made = type("Made", (WebhookReceiver,), {"source": "made"})
        special, rest = (lambda event: 1), (lambda event, execution: 2)
        made.on("a")(special)
        made.on("*")(rest)
        event: Any = None
        with pytest.raises(ValueError, match="'made' already has a handler for 'a'"):
            made.on("a", "b")
        results = {kind: handler(event, event) for kind, handler in made.consumer._handlers.items()}
        assert results == {"a": 1, "*": 2}
        prompt = type("Prompt", (made,), {})  # another view of the same messages
        assert prompt.consumer is made.consumer
        with pytest.raises(ImproperlyConfigured, match="Derive both from a class without a source"):
            type("Derived", (made,), {"source": "derived"})

    def test_found_by_the_urls(self) -> None:
        """A process that has imported no view finds the receivers by the URLs."""
        with override_settings(ROOT_URLCONF="tests.contrib.messaging.webhooks.receivers"):
            assert receivers()["shop"] is Hook
            assert "nobody" not in receivers()

    @pytest.mark.parametrize(
        ("attributes", "said"),
        [
            ({"source": "shop", "verifier": Hook.verifier}, "same source, 'shop'"),
            ({}, "Other has no verifier."),
            ({"verifier": Stripe(lambda: SECRETS[0])}, "Stripe has no list of secrets."),
            ({"verifier": StandardWebhooks(["", SECRETS[0]])}, "a secret that cannot be used: it"),
            ({"verifier": Hook.verifier, "policy": Policy(store="nowhere")}, "'nowhere'"),
        ],
    )
    def test_checks(
        self, monkeypatch: pytest.MonkeyPatch, attributes: dict[str, Any], said: str
    ) -> None:
        """The system checks find two of one source, missing secrets and policies that fail."""
        monkeypatch.setattr(receiving, "_RECEIVERS", {**_RECEIVERS})
        with override_settings(ROOT_URLCONF="tests.contrib.messaging.webhooks.receivers"):
            assert check_receivers() == []
            type("Other", (WebhookReceiver,), {"source": "other", **attributes})
            [message] = check_receivers()
        assert message.id == "idempotency_django.E041"
        assert said in message.msg
