"""Clients of the reference app: one that asks politely, and one that asks fifty times at once."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from dataclasses import dataclass, field
from http.client import HTTPResponse
from io import BytesIO
from typing import Any
from urllib.parse import urlsplit

import httpx

PROTECTED = (
    "/api/charges/",
    "/api/orders/",
    "/api/viamiddleware/",
    "/plain/orders/",
    "/decorated/orders/",
)
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
        self._http = httpx.Client(base_url=url, limits=one_request_each, timeout=60)

    def send(self, path: str, order: Order, **instead: Any) -> httpx.Response:
        """Send the order; ``content`` and ``headers`` can be others than the order's own."""
        return self._http.post(path, **{"content": order.body, "headers": order.headers, **instead})

    def send_at_once(self, path: str, order: Order, times: int) -> list[Answer]:
        """The answers to as many duplicates, released together, in the order they came in."""
        return asyncio.run(_send_at_once(self.url, _request(path, order), times))

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self._http.get(path, **options)

    def effects(self, order: Order) -> int:
        """How often what the order asks for was done."""
        answer = self.get("/effects/", params={"reference": order.reference})
        return int(answer.raise_for_status().json()["count"])

    def close(self) -> None:
        self._http.close()


@dataclass(frozen=True)
class Answer:
    """One of many answers; ``seconds`` after all requests were released."""

    status: int
    headers: dict[str, str]
    body: bytes
    seconds: float


def _request(path: str, order: Order) -> bytes:
    own = [("Host", "e2e"), ("Connection", "close"), ("Content-Length", str(len(order.body)))]
    lines = [f"{name}: {value}\r\n" for name, value in [*own, *order.headers]]
    return f"POST {path} HTTP/1.1\r\n{''.join(lines)}\r\n".encode() + order.body


async def _send_at_once(url: str, request: bytes, times: int) -> list[Answer]:
    at, answers = urlsplit(url), []
    # All are connected before the first is sent, so that nothing is left to do but to write.
    connections = await asyncio.gather(
        *(asyncio.open_connection(at.hostname, at.port) for _ in range(times))
    )

    async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raw = await reader.read()
        answers.append(_parsed(raw, time.perf_counter() - released))
        writer.close()
        await writer.wait_closed()

    released = time.perf_counter()
    for _, writer in connections:
        writer.write(request)
    await asyncio.gather(*(receive(*connection) for connection in connections))
    return answers


class _Received:
    """Bytes that were received already, as :class:`HTTPResponse` takes them from a socket."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def makefile(self, mode: str) -> BytesIO:
        return BytesIO(self._raw)


def _parsed(raw: bytes, seconds: float) -> Answer:
    response = HTTPResponse(_Received(raw))
    response.begin()
    return Answer(response.status, dict(response.headers), response.read(), seconds)
