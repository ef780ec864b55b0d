"""The loop of ``run_consumer``: receive a message, handle it, and acknowledge it after the commit.

Handlers run in a thread of their own, one message at a time. The loop's thread meanwhile tells the
broker that the process is alive.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Protocol

from django.db import close_old_connections, connections

from ....backoff import Backoff
from ....errors import OperationInProgress, StoreUnavailable
from .. import dead_letters, loops
from ..consumers import Consumer, Failed
from ..events import Event

logger = logging.getLogger("idempotency_django")

BACKOFF: Final = Backoff(timedelta(seconds=1), timedelta(minutes=1))
RECONNECT: Final = timedelta(seconds=5)
POLL: Final = 1.0
"""Seconds that a source waits for a message, and the loop between two signs of life to it."""

_UNCOUNTED: Final = (OperationInProgress, StoreUnavailable)


@dataclass(frozen=True, slots=True, eq=False)
class Incoming:
    """One delivery of a message.

    Attributes:
        place: where it is at its broker; the same at each delivery, as far as the broker can say.
        body: its body, as it came.
        headers: its headers, with its media type as ``content-type``.
        redelivered: whether it may have been delivered before.
        acknowledge: tells the broker to forget it.
    """

    place: str
    body: bytes
    headers: Sequence[tuple[str, Any]]
    redelivered: bool
    acknowledge: Callable[[], object]


class Source(Protocol):
    """A queue or topic of a broker. The loop's thread calls it, which runs no handler."""

    place: str

    def open(self) -> None:
        """Connect to the broker."""

    def receive(self) -> Incoming | None:
        """The next message, if one comes within :data:`POLL`."""

    def beat(self) -> None:
        """Tell the broker that the process is alive."""

    def close(self) -> None:
        """Leave the broker, which delivers again what was not acknowledged."""


def as_text(value: Any) -> str:
    """A header's name or value of any type, as a string."""
    try:
        return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    except RecursionError:
        return "nested too deeply to be shown"


class ConsumerLoop:
    """Has a consumer handle the messages of a source until it is stopped.

    Args:
        consumer: the consumer.
        source: where the messages come from, not open yet.
        stop: ends the loop after the message in hand.
        health: a file that is touched every few seconds; empty: none.

    Raises:
        ImproperlyConfigured: the consumer could handle no event.
    """

    def __init__(
        self,
        consumer: Consumer,
        source: Source,
        stop: threading.Event,
        *,
        health: str = "",
    ) -> None:
        consumer.validate()
        self._consumer = consumer
        self._source = source
        self._stop = stop
        self._health = health

    def run(self) -> None:
        """Handle messages; connect again whenever the broker cannot be reached."""
        name = f"consumer {self._consumer.name} from {self._source.place}"
        part = loops.Part(name, self._consume, poll=RECONNECT, goes_on=False)
        with ThreadPoolExecutor(1, "handlers") as self._handlers:
            try:
                loops.run([part], self._stop, name=name, health=self._health)
            finally:
                self._handlers.submit(connections.close_all)

    def _consume(self) -> None:
        """Connect, and handle messages for as long as the connection lasts."""
        try:
            self._source.open()
            while not self._stop.is_set():
                message = self._source.receive()
                if message is not None:
                    self._settle(message)
        except Exception as error:  # noqa: BLE001  # each client has its own errors
            logger.warning(
                "The consumer %s cannot reach its broker (%s) and will reconnect: %r",
                self._consumer.name,
                self._source.place,
                error,
            )
        finally:
            with suppress(Exception):  # the connection may be lost
                self._source.close()

    def _settle(self, message: Incoming) -> None:
        """Handle a message until it is done or dead-lettered, and then acknowledge it.

        It stays in hand meanwhile: brokers count what is given back, and drop it in the end.
        """
        tries = failures = 0
        while (error := self._awaited(message, failures)) is not None:
            if self._stop.is_set():
                return
            tries += 1
            failures += not isinstance(error, _UNCOUNTED)
            until = time.monotonic() + BACKOFF.after(tries).total_seconds()
            while (left := until - time.monotonic()) > 0 and not self._stop.wait(min(POLL, left)):
                self._source.beat()
        message.acknowledge()

    def _attempt(self, message: Incoming, failures: int) -> Exception | None:
        """Handle a message; why to try again, or ``None`` if the broker may forget it."""
        close_old_connections()
        event, consumer = None, self._consumer
        try:
            event = Event.from_json(message.body)
            consumer.handle(event, redelivered=message.redelivered or failures > 0)
        except _UNCOUNTED as error:
            logger.warning("The message at %s has to wait: %s", message.place, error)
            return error
        except Exception as error:
            is_last = consumer.max_attempts is not None and failures + 1 >= consumer.max_attempts
            if event is None or is_last or Failed(error).rejected:
                return self._dead_letter(message, error)
            logger.exception(
                "The event %s of %s was not handled by the consumer %s.",
                event.id,
                event.source,
                consumer.name,
            )
            return error
        return None

    def _dead_letter(self, message: Incoming, error: Exception) -> Exception | None:
        logger.error(
            "The message at %s is dead-lettered, because the consumer %s cannot handle it.",
            message.place,
            self._consumer.name,
            exc_info=error,
        )
        texts = [(name, as_text(value)) for name, value in message.headers]
        try:
            dead_letters.keep(
                self._consumer, message.body, error, place=message.place, headers=texts
            )
        except Exception as problem:
            logger.exception(
                "The message at %s (%d bytes) cannot be stored as a dead letter. It holds up this "
                "process, and is tried again.",
                message.place,
                len(message.body),
            )
            return problem
        return None

    def _awaited(self, message: Incoming, failures: int) -> Exception | None:
        """:meth:`_attempt` in the handlers' thread, with signs of life until it has ended."""
        attempt = self._handlers.submit(self._attempt, message, failures)
        what = f"the message at {message.place}"
        with loops.handling("consumer", self._consumer.name, what) as current:
            while not wait([attempt], POLL).done:
                if not current.lasts(loops.HANDLER_TIMEOUT):  # else another process may have it
                    self._source.beat()
        return attempt.result()
