"""Outgoing webhooks, as their receivers see them."""

from __future__ import annotations

import base64
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from idempotency_django.contrib.messaging import Endpoint, Event, HttpPublisher
from idempotency_django.contrib.messaging.brokers.base import (
    Refused,
)
from idempotency_django.contrib.messaging.outbox.topics import Topic

from .messages import failures, grouped, outgoing, published


def secret() -> str:
    """A new secret of Standard Webhooks."""
    return "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()


SECRET, OLDER = secret(), secret()
Reply = Callable[["Request"], tuple[int, dict[str, str], bytes]]


class Request:
    """What a receiver got."""

    def __init__(self, path: str, headers: dict[str, str], body: bytes) -> None:
        self.path = path
        self.headers = headers
        self.body = body
        self.event = Event.from_json(body)


class Receiver:
    """Responds to webhooks as it is told; by default it takes all of them."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.reply: Reply = lambda request: (204, {}, b"")
        self.over = threading.Event()
        self._lock = threading.Lock()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.take(self)

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hooks"

    def take(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers["content-length"]))
        headers = {name.lower(): value for name, value in handler.headers.items()}
        request = Request(handler.path, headers, body)
        with self._lock:
            self.requests.append(request)
        if request.event.id == "silent":
            self.over.wait(60)
        if request.event.id == "dripping":
            self.drip(handler)
        status, extra, text = self.reply(request)
        handler.send_response(status)
        for name, value in {"content-length": str(len(text)), **extra}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(text)

    def drip(self, handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        with suppress(OSError):  # the other side has hung up
            while not self.over.wait(0.05):
                handler.wfile.write(b"x-more: to come\r\n")

    @property
    def ids(self) -> list[str]:
        """The ids of what came, in that order."""
        return [request.headers["webhook-id"] for request in self.requests]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    thread = threading.Thread(target=receiver.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield receiver
    receiver.over.set()
    receiver.server.shutdown()
    thread.join()
    receiver.server.server_close()


def publisher(receiver: Receiver, **options: Any) -> HttpPublisher:
    """A publisher that sends everything there."""
    given: dict[str, Any] = {"url": receiver.url, "secrets": [SECRET]}
    return HttpPublisher("orders", **given | options)


def test_signed(receiver: Receiver) -> None:
    """A receiver verifies a webhook with the library of Standard Webhooks, by the new secret or by
    the one before it, and reads the event in its body.
    """
    assert published(publisher(receiver, secrets=[SECRET, OLDER]), grouped("a-1")) == [None]
    [request] = receiver.requests
    for known in (SECRET, OLDER):
        told = Webhook(known).verify(request.body, request.headers)
        assert told["type"] == "order.paid"
        assert told["data"] == {"order": "a-1"}
        assert told["time"] == "2031-05-07T09:30:00Z"
    with pytest.raises(WebhookVerificationError):
        Webhook(secret()).verify(request.body, request.headers)
    with pytest.raises(WebhookVerificationError):
        Webhook(SECRET).verify(request.body + b" ", request.headers)
    assert request.event.id == request.headers["webhook-id"] == "a-1"
    assert request.event.source == "/orders"
    assert request.headers["content-type"] == "application/json"


@pytest.mark.parametrize("status", [404, 410, 503])
def test_refused(receiver: Receiver, status: int) -> None:
    """Any status from 300 is a failure, which names it, and an attempt."""
    receiver.reply = lambda request: (status, {}, b"Sorry, no.")
    [error] = published(publisher(receiver), grouped("a-1"))
    assert isinstance(error, Refused)
    assert not error.final
    assert f"/hooks responded with {status} " in str(error)


def test_redirects(receiver: Receiver) -> None:
    """A redirect is a failure: whoever controls a receiver does not choose where we send to."""
    receiver.reply = lambda request: (307, {"location": "/elsewhere"}, b"")
    [error] = published(publisher(receiver), grouped("a-1"))
    assert "responded with 307" in str(error)
    assert [request.path for request in receiver.requests] == ["/hooks"]


@pytest.mark.parametrize(
    ("value", "delay"),
    [
        ("120", (120, 120)),
        ("a date", (500, 600)),
        ("999999999", (3600, 3600)),
        ("soon", (0, 0)),
    ],
)
def test_retry_after(receiver: Receiver, value: str, delay: tuple[int, int]) -> None:
    """A receiver says when to come again, up to an hour."""
    if value == "a date":
        value = format_datetime(datetime.now(UTC) + timedelta(seconds=600), usegmt=True)
    receiver.reply = lambda request: (503, {"retry-after": value}, b"")
    [error] = published(publisher(receiver), grouped("a-1"))
    assert isinstance(error, Refused)
    assert delay[0] <= error.delay.total_seconds() <= delay[1]


def test_order_of_groups(receiver: Receiver) -> None:
    """Webhooks of one group come one after the other, in their order, and stop at a failure.
    Groups do not wait for one another.
    """
    both = threading.Barrier(2, timeout=20)

    def reply(request: Request) -> tuple[int, dict[str, str], bytes]:
        if request.event.id in ("a-1", "b-1"):
            both.wait()
        return (500 if request.event.id == "a-2" else 200, {}, b"")

    receiver.reply = reply
    results = published(publisher(receiver), grouped("a-1", "a-2", "b-1", "a-3", "b-2"))
    assert failures(results) == [False, True, False, True, False]
    assert [each for each in receiver.ids if each.startswith("a")] == ["a-1", "a-2"]
    assert [each for each in receiver.ids if each.startswith("b")] == ["b-1", "b-2"]


@pytest.mark.parametrize("name", ["silent", "dripping"])
def test_timeout(receiver: Receiver, name: str) -> None:
    """A receiver whose response does not come, or has no end, is given up. Others get theirs."""
    with ThreadPoolExecutor() as pool:
        results = pool.submit(
            published,
            publisher(receiver, timeout=timedelta(seconds=2)),
            [outgoing(name), outgoing("quick")],
        )
        slow, quick = results.result(timeout=60)
        receiver.over.set()
    assert isinstance(slow, TimeoutError)
    assert quick is None


def test_unreachable(receiver: Receiver) -> None:
    """A receiver that is away is a failure of its own webhooks only."""
    receiver.server.shutdown()
    receiver.server.server_close()
    [error] = published(publisher(receiver), grouped("a-1"))
    assert isinstance(error, Exception)


ENDPOINTS: dict[str, Endpoint | None] = {}


class Slow(HttpPublisher):
    """Takes until the batch must end to find out that a message has no receiver."""

    def endpoint_of(self, message: Event) -> Endpoint | None:
        while time.monotonic() < deadlines[-1]:
            time.sleep(0.01)
        return None


deadlines: list[float] = []


def test_slow_endpoint() -> None:
    """A look-up that takes longer than a batch may keeps no message from being sent."""
    deadlines.append(time.monotonic() + 0.2)
    [first, *_] = published(Slow("orders"), [outgoing("a"), outgoing("b")], deadlines[-1])
    assert first is None


class Customers(HttpPublisher):
    """Sends to the endpoint of the message's group."""

    def endpoint_of(self, message: Event) -> Endpoint | None:
        """An unknown endpoint is an error, and so are some others."""
        if message.subject == "exit":
            sys.exit(3)
        if message.subject == "import":
            raise ImportError(message.subject)
        if message.subject == "text":
            return "https://a.example/"  # type: ignore[return-value]  # a mistake
        return ENDPOINTS[message.subject or ""]


def test_endpoints(receiver: Receiver) -> None:
    """A subclass says where each message goes and how it is signed, or that nobody wants it. Where
    it fails, only its message does.
    """
    ENDPOINTS["a"] = Endpoint(f"{receiver.url}/a", [SECRET])
    ENDPOINTS["b"] = Endpoint(f"{receiver.url}/b", [OLDER])
    ENDPOINTS["none"] = None
    ENDPOINTS["plain"] = Endpoint("ftp://localhost/", [SECRET])
    sender = Customers("orders")
    failing = grouped("exit-1", "import-1", "text-1", "unknown-1", "plain-1")
    results = published(sender, [*failing, *grouped("a-1", "b-1", "none-1")])
    assert failures(results) == [True] * len(failing) + [False] * 3
    assert "SystemExit(3)" in str(results[0])
    assert "returned 'https://a.example/', not an Endpoint" in str(results[2])
    found = {request.path: request for request in receiver.requests}
    assert set(found) == {"/hooks/a", "/hooks/b"}
    Webhook(OLDER).verify(found["/hooks/b"].body, found["/hooks/b"].headers)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "has no host"),
        ({"url": "https:///path", "secrets": [SECRET]}, "has no host"),
        ({"url": "https://a.example:99999/", "secrets": [SECRET]}, "Port out of range"),
        ({"url": "https://a.example/", "secrets": []}, "has no list of secrets"),
        ({"url": "https://a.example/", "secrets": SECRET}, "has no list of secrets"),
        (
            {"url": "https://a.example/", "secrets": [SECRET, "hunter2"]},
            "has a secret that cannot be used",
        ),
        ({"url": "https://a.example/", "secrets": [SECRET], "nonsense": 1}, "nonsense"),
    ],
)
def test_wrong_options(options: dict[str, Any], why: str) -> None:
    """What cannot work is refused when the publisher is made, and never shows a secret."""
    topic = Topic(name="orders", backend="http", options=options)
    with pytest.raises(ImproperlyConfigured, match=why) as caught:
        topic.publisher()
    assert "hunter2" not in str(caught.value)
    assert SECRET not in str(caught.value)
