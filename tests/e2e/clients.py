"""Clients of the reference app: one that asks politely, and one that asks fifty times at once."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection
from typing import Any

import httpx
import pytest

from idempotency_django.testing import PATIENCE

# The claim is held by the transaction of the effect, unless Redis keeps it …
TRANSACTIONAL = (
    "/api/charges/",
    "/api/orders/",
    "/api/viamiddleware/",
    "/plain/orders/",
    "/decorated/orders/",
)
TRANSFERS = "/api/transfers/"
PAYOUTS = "/api/payouts/"
ASYNC = "/async/orders/"
# … or it is committed first, and the effect is one of the operation's steps.
LEASED = (TRANSFERS, PAYOUTS, ASYNC)
PROTECTED = TRANSACTIONAL + LEASED
IN_PROGRESS = (202, 409)
UNPROTECTED = "/api/unprotected/"


@dataclass(frozen=True)
class Order:
    """What one request asks for, in whose name, and what is to go wrong."""

    reference: str = field(default_factory=lambda: uuid.uuid4().hex)
    key: str | None = field(default_factory=lambda: str(uuid.uuid4()))
    amount: int = 100
    token: str | None = "alice-token"
    fault: str = ""

    @property
    def body(self) -> bytes:
        asked = {"reference": self.reference, "amount": self.amount, "currency": "EUR"}
        return json.dumps(asked).encode()

    @property
    def headers(self) -> list[tuple[str, str]]:
        optional = {
            "Authorization": self.token and f"Token {self.token}",
            "Idempotency-Key": self.key,
            "X-Simulate": self.fault,
        }
        sent = [(name, value) for name, value in optional.items() if value]
        return [("Content-Type", "application/json"), *sent]


class Api:
    """The reference app at a URL. Each request has a connection of its own."""

    def __init__(self, url: str) -> None:
        self.url = url
        one_request_each = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.Client(
            base_url=url,
            limits=one_request_each,
            timeout=60,
            verify=False,  # or it would read all of the system's certificates, for each test
        )

    def send(self, path: str, order: Order, **instead: Any) -> httpx.Response:
        """Send the order; ``content`` and ``headers`` can be others than the order's own."""
        return self._http.post(path, **{"content": order.body, "headers": order.headers, **instead})

    def request(self, method: str, path: str, order: Order, **headers: str) -> httpx.Response:
        """Send the order by another method, with headers by their names in Python."""
        named = [(name.replace("_", "-"), value) for name, value in headers.items()]
        body = b"" if method in ("GET", "DELETE") else order.body
        return self._http.request(method, path, content=body, headers=[*order.headers, *named])

    def send_at_once(self, path: str, order: Order, times: int) -> list[Result]:
        """The responses to as many duplicates, released together, in the order they came in."""
        responses: list[Result] = []
        barrier = threading.Barrier(times, timeout=PATIENCE)

        def send(_: int) -> None:
            with closing(self._connected()) as connection:
                barrier.wait()
                connection.request("POST", path, order.body, dict(order.headers))
                response = connection.getresponse()
                body = response.read()
                responses.append(Result(response.status, dict(response.headers), body))

        with ThreadPoolExecutor(times) as pool:
            list(pool.map(send, range(times)))
        return responses

    def send_and_leave(self, path: str, order: Order, wait: Callable[[], object]) -> None:
        """Send the order, wait, and hang up without a look at the response."""
        with closing(self._connected()) as connection:
            connection.request("POST", path, order.body, dict(order.headers))
            wait()

    def _connected(self) -> HTTPConnection:
        connection = HTTPConnection(self.url.partition("://")[2], timeout=PATIENCE)
        connection.connect()
        return connection

    def killed(self, path: str, order: Order, moment: str) -> None:
        """Send the order; the process that serves it is killed at that moment."""
        with pytest.raises(httpx.RemoteProtocolError):
            self.send(path, replace(order, fault=f"kill={moment}"))

    def send_until_done(self, path: str, order: Order) -> httpx.Response:
        """Send the order again while it is said to be in progress; the other response."""
        deadline = time.monotonic() + PATIENCE
        while (response := self.send(path, order)).status_code in IN_PROGRESS:
            assert int(response.headers["Retry-After"]) >= 1
            assert time.monotonic() < deadline, f"{order} stayed in progress."
            time.sleep(0.1)  # less patient than Retry-After asks for
        return response

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self._http.get(path, **options)

    def effects(self, order: Order, kind: str = "") -> int:
        """How often what the order asks for was done, in one way or in any."""
        response = self.get("/effects/", params={"reference": order.reference, "kind": kind})
        return int(response.raise_for_status().json()["count"])

    def postings(self, order: Order) -> tuple[int, int]:
        """How often what a transfer asks for was debited and credited."""
        response = self.get("/postings/", params={"reference": order.reference})
        told = response.raise_for_status().json()
        return told["debit"], told["credit"]

    def close(self) -> None:
        self._http.close()


@dataclass(frozen=True)
class Result:
    """One of many responses."""

    status: int
    headers: dict[str, str]
    body: bytes


def verdict(response: Result, executed: Result) -> str:
    """What a response is, in relation to the one that was executed."""
    if response is executed:
        return "executed"
    if response.status == 409 and int(response.headers["Retry-After"]) >= 1:
        return "in progress"
    replay = response.status == 201 and response.headers["Idempotent-Replayed"] == "true"
    same = (response.body, response.headers["Location"]) == (
        executed.body,
        executed.headers["Location"],
    )
    return "replayed" if replay and same else f"wrong: {response}"


def executed_of(responses: list[Result]) -> Result:
    """The one response that is neither a refusal nor a replay."""
    (executed,) = (
        response
        for response in responses
        if response.status == 201 and "Idempotent-Replayed" not in response.headers
    )
    return executed
