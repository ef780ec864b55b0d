"""Handlers and outages that take longer than a broker waits."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest

from idempotency_django.contrib.messaging import Consumer, Event
from tests.models import Effect
from tests.support.nightly import nightly
from tests.support.servers import Server

from .brokers import Kafka, RabbitMQ, await_that

pytestmark = pytest.mark.django_db(transaction=True)


def paid(number: str) -> Event:
    """An event, as its sender makes it."""
    return Event(id=number, source="/shop", type="order.paid")


def booking(calls: list[str], hold: threading.Event | None = None, longest: float = 30) -> Consumer:
    """A consumer that notes each call of it, and waits at the first event."""
    consumer = Consumer("billing")
    real = consumer.handle

    def handle(event: Event, **arguments: Any) -> Any:
        calls.append(event.id)
        return real(event, **arguments)

    consumer.handle = handle  # type: ignore[method-assign]

    @consumer.on("order.paid")
    def book(event: Event, execution: Any) -> None:
        if hold is not None:
            hold.wait(longest)
        Effect.objects.create(reference=event.id)

    return consumer


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("redis", {"visibility": 1}),
        nightly("kafka", {}),
        nightly("sqs", {"visibility": 1}),
        nightly("sqs", {"visibility": 1, "suffix": ".fifo"}),
    ],
)
def test_slower_than_the_broker_waits(place: Any, name: str, short: dict[str, Any]) -> None:
    """The others give it to another process, which finds that it is being handled: one effect."""
    broker, calls = place(name, **short), list[str]()
    if isinstance(broker, Kafka):
        broker.config |= {"session.timeout.ms": 2000, "max.poll.interval.ms": 2000}
    hold = threading.Event()
    consumer = booking(calls, hold, 6.0)
    broker.publish(paid("a"))
    with broker.running(consumer) as first, broker.running(consumer) as second:
        await_that(lambda: bool(Effect.objects.exists()))
        hold.set()  # the next one is quick
        broker.publish(paid("b"))
        await_that(lambda: Effect.objects.count() == 2 and broker.left() == 0)
    assert (first.error, second.error) == (None, None)
    assert sorted(Effect.objects.values_list("reference", flat=True)) == ["a", "b"]


class Way:
    """A way to a server that can be cut: each connection is reset, and the next ones are taken."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._open: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def cut(self) -> None:
        """Break what is connected."""
        connections, self._open = self._open, []
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Take nobody any more."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                self._open += [client, server]
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with source, suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)


@contextmanager
def way_to(server: Server) -> Iterator[tuple[Way, str]]:
    """A way to a server, and the URL that leads over it."""
    at = urlsplit(server.url)
    way = Way((at.hostname or "", at.port or 5672))
    login = at.netloc.rpartition("@")[0]
    try:
        yield way, urlunsplit(at._replace(netloc=f"{login}@127.0.0.1:{way.port}"))
    finally:
        way.close()


def test_the_connection_breaks(rabbit: Server, caplog: pytest.LogCaptureFixture) -> None:
    """RabbitMQ goes away while a handler runs: its message comes again, as a duplicate."""
    calls: list[str] = []
    hold = threading.Event()
    consumer = booking(calls, hold)
    with way_to(rabbit) as (way, url), caplog.at_level(logging.WARNING):
        broker = RabbitMQ(rabbit, url)
        broker.publish(paid("a"))
        with broker.running(consumer) as loop:
            await_that(lambda: calls == ["a"])
            way.cut()
            hold.set()
            await_that(lambda: calls == ["a", "a"])
            broker.publish(paid("b"))
            await_that(lambda: Effect.objects.count() == 2)
    assert loop.error is None
    # The duplicate comes again after the event that follows, if the first delivery is not over yet.
    assert sorted(Effect.objects.values_list("reference", flat=True)) == ["a", "b"]
    assert "cannot reach its broker" in caplog.text
    assert broker.left() == 0
    broker.close()
