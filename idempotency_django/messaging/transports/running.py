"""The loop of all transports: fetch, hand over, acknowledge after the commit.

Handlers run in a thread of their own, one batch at a time. The loop's thread meanwhile tells the
broker that the messages are being handled, so a handler may take longer than the broker waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Final, TypeVar, assert_never

from django.db import close_old_connections, connections

from .. import parking
from ..consumers import Consumer
from ..stopping import stop_on_signals
from .base import Transport
from .handover import Handover
from .incoming import Incoming
from .options import Chosen
from .verdicts import Done, Later, Refused, Rejected, Unavailable, Verdict

logger = logging.getLogger("idempotency_django")

BEAT: Final = 1.0
"""Seconds between two signs of life to the broker while a handler runs."""
RENEWAL: Final = 60.0
"""Seconds after which a busy process looks whether its database connections are too old."""

_T = TypeVar("_T")


class Loop:
    """Takes messages from a transport until it is told to stop.

    Args:
        transport: the broker, not open yet.
        consumer: who handles the messages.
        chosen: the options.

    Raises:
        ImproperlyConfigured: the options do not fit the consumer, or it can handle no event.
    """

    def __init__(self, transport: Transport, consumer: Consumer, chosen: Chosen) -> None:
        chosen.check(consumer)
        consumer.refuse_unready()
        self._transport = transport
        self._chosen = chosen
        self._stop = chosen.stop or threading.Event()
        self._handover = Handover(consumer, chosen)
        self._name = f"{consumer.name} on {transport.name}"
        self._renewed = 0.0

    def run(self) -> None:
        """Handle messages until the loop is stopped; then finish the batch in hand, and leave.

        Raises:
            ImproperlyConfigured: there is nothing to read from, or no place for messages that
                cannot be handled.
            UnknownEventType: the consumer has no handler for an event, with ``unknown="stop"``.
        """
        self._alive()  # a path that cannot be written to fails at once
        with stop_on_signals(self._stop), ThreadPoolExecutor(1, "handlers") as self._handlers:
            try:
                self._run()
            finally:
                self._handlers.submit(connections.close_all).result()

    def _run(self) -> None:
        failures = 0
        while not self._stop.is_set():
            try:
                self._transport.open()
                if not parking.can_park():
                    self._transport.refuse_loss()
                while not self._stop.is_set():
                    self._round()
                    failures = 0
            except self._transport.lost as error:
                failures += 1
                logger.warning(
                    "The consumer %s cannot reach its broker, and tries again soon: %r",
                    self._name,
                    error,
                )
            finally:
                self._leave()
            if failures:
                self._sleep(self._chosen.pause_after(failures))

    def _round(self) -> None:
        self._alive()
        messages = self._transport.fetch(self._chosen.batch)
        if not messages or time.monotonic() - self._renewed > RENEWAL:
            self._renew()
        failures = 0
        while messages:
            messages, error = self._settled(messages, self._handled(messages))
            if error is None:
                return
            failures += 1
            pause = self._chosen.pause_after(failures)
            logger.error(
                "The database is unavailable, so the consumer %s waits for %s seconds: %s",
                self._name,
                pause,
                error,
            )
            self._sleep(pause, messages)
            if self._stop.is_set():
                self._transport.release(messages)
                return
            self._renew()

    def _handled(self, messages: Sequence[Incoming]) -> list[Verdict]:
        return self._awaited(self._handlers.submit(self._handover, messages), messages)

    def _settled(
        self, messages: Sequence[Incoming], verdicts: Sequence[Verdict]
    ) -> tuple[list[Incoming], Exception | None]:
        """Tell the broker of each message; those to be handed over again, and why."""
        done, kept = [], []
        problem: Exception | None = None
        refusal: Exception | None = None
        for message, verdict in zip(messages, verdicts, strict=True):
            match verdict:
                case Done():
                    done.append(message)
                case Later(seconds):
                    self._transport.postpone(message, seconds)
                case Rejected(error):
                    rejection = self._rejected(message, error)
                    refusal = refusal or rejection
                case Unavailable(error):
                    kept.append(message)
                    problem = error
                case Refused(error):
                    refusal = refusal or error
                case _:
                    assert_never(verdict)
        self._transport.acknowledge(done)
        if refusal is not None:
            raise refusal
        return kept, problem

    def _rejected(self, message: Incoming, error: Exception) -> Exception | None:
        """What the transport raises; its neighbours are to be acknowledged before."""
        try:
            self._transport.reject(message, error)
        except self._transport.lost:
            raise
        except Exception as refusal:  # noqa: BLE001  # raised later
            return refusal
        return None

    def _awaited(self, future: Future[_T], messages: Sequence[Incoming]) -> _T:
        """The result of what the other thread does, with signs of life while it does it."""
        started = time.monotonic()
        lost: BaseException | None = None
        while not wait([future], BEAT).done:
            if time.monotonic() - started > self._chosen.patience:
                continue
            self._alive()
            if lost is None:
                try:
                    self._transport.beat(messages)
                except self._transport.lost as error:
                    lost = error  # what the handler does is committed, and comes again
        result = future.result()
        if lost is not None:
            raise lost
        return result

    def _sleep(self, seconds: float, messages: Sequence[Incoming] = ()) -> None:
        """Wait, unless the loop is stopped."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self._stop.wait(min(BEAT, left)):
            self._alive()
            if messages:
                self._transport.beat(messages)

    def _renew(self) -> None:
        """Close the database connections that are unusable, or older than the settings allow."""
        self._handlers.submit(close_old_connections).result()
        self._renewed = time.monotonic()

    def _alive(self) -> None:
        if self._chosen.health is not None:
            Path(self._chosen.health).touch()

    def _leave(self) -> None:
        try:
            self._transport.close()
        except self._transport.lost as error:
            logger.warning("The consumer %s could not leave its broker: %r", self._name, error)
