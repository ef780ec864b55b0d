"""The loop of all transports: fetch, hand over, acknowledge after the commit.

Handlers run in a thread of their own, one batch at a time. The loop's thread meanwhile tells the
broker that the messages are being handled, so a handler may take longer than the broker waits.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, assert_never, get_args
from urllib.parse import quote

from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, InterfaceError, close_old_connections, connections

from ....backoff import Backoff
from ....conf import seconds_of
from ....errors import OperationInProgress, StoreUnavailable, UnknownEventType
from ....management import stop_on_signals
from .. import dead_letters
from .. import events as envelopes
from ..consumers import Consumer, Duplicate, Failed, Handled, Outcome
from ..events import Event

NO_DEAD_LETTERS: Final = (
    "There is no place for dead letters, so they would be lost. Pass a {} as dead_letter=, or add "
    "'idempotency_django.contrib.messaging' to INSTALLED_APPS to store dead letters in the "
    "database."
)


class Transport(ABC):
    """A connection to one broker. All of it is called by one thread, which runs no handler.

    Attributes:
        name: what it is called in logs.
        lost: the errors that say that the broker cannot be reached, or has sent us away. The loop
            then closes the transport, waits, and opens it again.
    """

    name: ClassVar[str]
    lost: ClassVar[tuple[type[BaseException], ...]]

    @abstractmethod
    def open(self) -> None:
        """Connect to the broker.

        Raises:
            ImproperlyConfigured: there is nothing to read from, and no waiting will help.
        """

    @abstractmethod
    def validate_dead_letters(self) -> None:
        """Make sure that the broker keeps what :meth:`reject` is called with.

        The loop calls it after :meth:`open`, where no table keeps such messages.

        Raises:
            ImproperlyConfigured: it would lose them.
        """

    @abstractmethod
    def fetch(self, limit: int) -> list[Incoming]:
        """Wait a few seconds for messages.

        Args:
            limit: how many to return at most.
        """

    @abstractmethod
    def beat(self, messages: Sequence[Incoming]) -> None:
        """Tell the broker that these messages are being handled still; called each second."""

    @abstractmethod
    def acknowledge(self, messages: Sequence[Incoming]) -> None:
        """Tell the broker to forget these messages: what they asked for is committed."""

    @abstractmethod
    def postpone(self, message: Incoming, seconds: float) -> None:
        """Have this message delivered again after some seconds."""

    @abstractmethod
    def reject(self, message: Incoming, error: Exception) -> None:
        """Move this message to the broker's dead letters.

        It is acknowledged only after that.
        """

    def release(self, messages: Sequence[Incoming]) -> None:  # most need not
        """Give these messages back: this process ends, and has not handled them.

        A broker that redelivers unacknowledged messages of a closed connection needs none.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave the broker; what was not acknowledged is delivered to another consumer."""


MAX_HEADERS: Final = 64 * 1024
"""The most characters in the names and values of a message's headers."""

_ATTRIBUTE: Final = re.compile(r"(?:ce[_-]|cloudevents[:_])(.+)", re.IGNORECASE)
_ENVELOPE: Final = "application/cloudevents"
_CONTENT_TYPES: Final = frozenset({"content-type", "content_type", "contenttype"})


@dataclass(frozen=True, slots=True, eq=False)
class Incoming:
    """One delivery of a message.

    Attributes:
        place: where it is at its broker; the same at each delivery, as far as the broker can say.
        body: its body, as it came.
        headers: its headers, with its media type as ``content-type``.
        redelivered: whether it may have been delivered before.
        native: the message of the broker's client library.
        error: why the body is not what the sender has sent; ``None``: it is.
    """

    place: str
    body: bytes
    headers: Sequence[tuple[str, Any]]
    redelivered: bool
    native: Any
    error: Exception | None = None

    @property
    def texts(self) -> list[tuple[str, str]]:
        """The headers as strings, of any type."""
        return [(name, as_text(value)) for name, value in self.headers]

    def validate_size(self, max_body_bytes: int) -> None:
        """Raise ``ValueError`` if the body or the headers are too large to be read."""
        if len(self.body) > max_body_bytes:
            raise ValueError(
                f"The body has {len(self.body)} bytes, which is more than {max_body_bytes} "
                "(max_body_bytes)."
            )
        if (size := sum(len(name) + len(text) for name, text in self.texts)) > MAX_HEADERS:
            raise ValueError(
                f"The headers have {size} characters, which is more than {MAX_HEADERS}."
            )


def as_text(value: Any) -> str:
    """A header's value of any type, as a string."""
    try:
        return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    except RecursionError:
        return "nested too deeply to be shown"


def event_of(message: Incoming) -> Event:
    """The event in a message: its attributes are headers, or all of it is JSON in the body.

    Raises:
        ValueError: there is none; the text says why.
    """
    attributes: dict[str, str] = {}
    content_type = ""
    for name, value in message.headers:
        if value is None:
            continue
        attribute = _ATTRIBUTE.fullmatch(name)
        if attribute:
            header = f"ce-{attribute[1].lower()}"
            if header in attributes:
                raise ValueError(f"The message has two headers for the attribute {attribute[1]}.")
            attributes[header] = quote(_text(name, value), safe="")
        elif name.lower() in _CONTENT_TYPES:
            content_type = _text(name, value)
    if not attributes and not content_type.startswith(_ENVELOPE):
        content_type = envelopes.STRUCTURED  # or it is plain JSON: many senders set another type
    headers = {**attributes, **({"content-type": content_type} if content_type else {})}
    return Event.from_http(headers, message.body)


def _text(name: str, value: Any) -> str:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise ValueError(f"The header {name} is not text in UTF-8.") from None
    if isinstance(value, datetime):
        return envelopes.write_time(value)
    return str(value).lower() if isinstance(value, bool) else as_text(value)


@dataclass(frozen=True, slots=True)
class Ack:
    """All that the message asks for is committed, or it is kept elsewhere. Acknowledge it."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Deliver it again after some seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """It cannot be handled, and only the broker can keep it."""

    error: Exception


@dataclass(frozen=True, slots=True)
class WaitForDatabase:
    """The database does not answer. Keep the message, and hand it over again.

    A broker that got it back would count that, and give the message up during a long outage.
    """

    error: Exception


@dataclass(frozen=True, slots=True)
class Stop:
    """The loop is to end: the message cannot be handled, and must stay where it is."""

    error: Exception


Verdict = Ack | Retry | DeadLetter | WaitForDatabase | Stop


Unknown = Literal["dead_letter", "ignore", "stop"]


@dataclass(frozen=True, slots=True)
class ConsumerOptions:
    """The options that the ``run()`` of each broker has besides its own, as keyword arguments.

    Attributes:
        batch: how many messages to handle in one transaction, if so many are there (default: 1).
            The order of messages is kept if it is 1; otherwise a message that fails is handled
            after those that came with it.
        event: makes an :class:`~idempotency_django.contrib.messaging.Event` of the message of the
            broker's client library; ``None``: skip the message. By default the message is a
            CloudEvent.
        sender: says who sent the message of the broker's client library, as the broker has
            authenticated them; for a federated consumer.
        max_body_bytes: how large the body of a message may be, inflated (default: 5 MiB). A larger
            one is set aside unread.
        unknown: what to do with an event for which the consumer has no handler: ``"dead_letter"``
            (default), ``"ignore"``: acknowledge it, or ``"stop"``: end with an error, and leave it.
        pause: how long a message that failed waits for its next delivery, doubled at each failure
            (default: a second).
        longest_pause: the upper limit of that (default: a minute).
        handler_timeout: how long handling a batch may take (default: 15 minutes). After that, the
            process does not renew its claim on the messages, nor touch the health file.
        health: the path of a file that is touched at least every few seconds, for probes.
        stop: the loop ends after it is set. SIGTERM and SIGINT set it, too.
    """

    batch: int = 1
    event: Callable[[Any], Event | None] | None = None
    sender: Callable[[Any], str] | None = None
    max_body_bytes: int = 5 * 1024 * 1024
    unknown: Unknown = "dead_letter"
    pause: timedelta = timedelta(seconds=1)
    longest_pause: timedelta = timedelta(minutes=1)
    handler_timeout: timedelta = timedelta(minutes=15)
    health: str | os.PathLike[str] | None = None
    stop: threading.Event | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "max_body_bytes"):
            value = getattr(self, name)
            if not (isinstance(value, int) and value >= 1):
                raise ImproperlyConfigured(f"{name} is {value!r}; it must be 1 or more.")
        if self.unknown not in get_args(Unknown):
            raise ImproperlyConfigured(
                f"unknown is {self.unknown!r}; it must be one of {', '.join(get_args(Unknown))}."
            )
        for name in ("pause", "longest_pause", "handler_timeout"):
            seconds_of(name, getattr(self, name))

    def check(self, consumer: Consumer) -> None:
        """Refuse a consumer that these options do not fit.

        Raises:
            ImproperlyConfigured: no event could be handled.
        """
        if consumer.federated and self.sender is None:
            raise ImproperlyConfigured(
                f"The consumer {consumer.name!r} is federated, so the transport needs the sender "
                "of each message. Pass sender=, a function that takes the broker's message and "
                "returns its sender."
            )
        if self.sender is not None and not consumer.federated:
            raise ImproperlyConfigured(
                f"The consumer {consumer.name!r} is not federated. Leave out sender=, or make it a "
                "Consumer(…, federated=True)."
            )

    def pause_after(self, failures: int) -> float:
        """Seconds to wait after this number of failures in a row."""
        return Backoff(self.pause, self.longest_pause).after(failures).total_seconds()


logger = logging.getLogger("idempotency_django")

_DOWN: Final = (StoreUnavailable, DatabaseError, InterfaceError)
_REMEMBERED: Final = 10_000
"""The most messages whose failures are counted: SQS can deliver a message to another process
next.
"""


@dataclass(frozen=True, slots=True)
class _Delivery:
    """A message, and the event in it; ``None``: it has none that can be read."""

    message: Incoming
    event: Event | None = None
    sender: str = ""

    @property
    def arguments(self) -> dict[str, Any]:
        return {"sender": self.sender, "redelivered": self.message.redelivered}


class MessageProcessor:
    """Has one consumer handle the messages of one transport, and decides what becomes of each.

    Args:
        consumer: the consumer.
        options: the loop's options.
    """

    def __init__(self, consumer: Consumer, options: ConsumerOptions) -> None:
        self._consumer = consumer
        self._options = options
        self._failures: dict[str, int] = {}

    def __call__(self, messages: Sequence[Incoming]) -> list[Verdict]:
        """Handle the messages in their order; the verdict on each."""
        read = [self._read(message) for message in messages]
        deliveries = [each for each in read if isinstance(each, _Delivery)]
        verdicts: list[Verdict] = []
        # Neighbours for whom the consumer is called alike are a batch.
        for _, alike in groupby(deliveries, lambda delivery: delivery.arguments):
            batch = [*alike]
            verdicts += map(self._verdict, batch, self._outcomes(batch))
        following = iter(verdicts)
        return [next(following) if isinstance(each, _Delivery) else each for each in read]

    def _read(self, message: Incoming) -> _Delivery | Verdict:
        options = self._options
        try:
            if message.error is not None:
                raise message.error
            message.validate_size(options.max_body_bytes)
            event = options.event(message.native) if options.event else event_of(message)
            sender = options.sender(message.native) if options.sender else ""
        except Exception as error:  # noqa: BLE001  # whatever a function of the project raises
            return self._set_aside(_Delivery(message), error)
        if event is None:
            return self._ack(message)
        if message.place in self._failures:
            message = replace(message, redelivered=True)
        return _Delivery(message, event, sender)

    def _outcomes(self, batch: list[_Delivery]) -> list[Outcome]:
        events, arguments = [each.event for each in batch if each.event], batch[0].arguments
        if len(events) > 1:
            return self._consumer.handle_many(events, **arguments)
        try:
            return [self._consumer.handle(events[0], **arguments)]
        except Exception as error:  # noqa: BLE001  # it is this event's, whatever it is
            return [Failed(error)]

    def _verdict(self, delivery: _Delivery, outcome: Outcome) -> Verdict:
        options = self._options
        match outcome:
            case Handled() | Duplicate():
                return self._ack(delivery.message)
            case Failed(StoreUnavailable() as error):
                return WaitForDatabase(error)
            case Failed(UnknownEventType()) if options.unknown == "ignore":
                return self._ack(delivery.message)
            case Failed(UnknownEventType() as error) if options.unknown == "stop":
                return Stop(error)
            case Failed(error) if outcome.rejected:
                return self._set_aside(delivery, error)
            case Failed(OperationInProgress(remaining=None)):
                return Retry(options.pause_after(1))
            case Failed(OperationInProgress() as busy):
                longest = options.longest_pause.total_seconds()
                return Retry(max(0.1, min(busy.remaining or 0, longest)))
            case Failed(error):
                return self._failed(delivery, error)

    def _failed(self, delivery: _Delivery, error: Exception) -> Verdict:
        """Another delivery may help, unless it was tried as often as the consumer allows.

        The consumer counts its attempts. What fails before an attempt begins it cannot count.
        """
        limit, failures = self._consumer.max_attempts, self._count(delivery.message)
        event: Any = delivery.event
        logger.error(
            "The event %s of %s was not handled by the consumer %s.",
            event.id,
            event.source,
            self._consumer.name,
            exc_info=error,
        )
        if limit is not None and failures >= limit:
            return self._set_aside(delivery, error)
        return Retry(self._options.pause_after(failures))

    def _set_aside(self, delivery: _Delivery, error: Exception) -> Verdict:
        """Keep a message that cannot be handled in the database, or have the broker keep it."""
        message = delivery.message
        logger.error(
            "The message at %s is dead-lettered, because the consumer %s cannot handle it.",
            message.place,
            self._consumer.name,
            exc_info=error,
        )
        if not dead_letters.can_keep():
            self._ack(message)
            return DeadLetter(error)
        try:
            self._keep(delivery, error)
        except _DOWN as down:
            # A message that the database does not take must neither hold up the others nor be lost.
            if not dead_letters.takes_others(self._consumer):
                return WaitForDatabase(down)
            logger.error(  # noqa: TRY400  # it says all there is
                "The message at %s (%d bytes) cannot be dead-lettered, because the database "
                "refuses it: %s. It stays in the broker and is retried. If it is too large, raise "
                "the database's limit (max_allowed_packet of MariaDB and MySQL).",
                message.place,
                len(message.body),
                down,
            )
            return Retry(self._options.pause_after(self._count(message)))
        return self._ack(message)

    def _keep(self, delivery: _Delivery, error: Exception) -> None:
        message, event = delivery.message, delivery.event
        if event is not None:
            # Not where a function of the project has made data that are not JSON.
            with suppress(ValueError, TypeError):
                dead_letters.keep(self._consumer, event, error, sender=delivery.sender)
                return
        dead_letters.keep_raw(self._consumer, message.place, message.body, error, message.texts)

    def _count(self, message: Incoming) -> int:
        """The failures of the message here, with this one."""
        failures = self._failures[message.place] = self._failures.pop(message.place, 0) + 1
        while len(self._failures) > _REMEMBERED:
            del self._failures[next(iter(self._failures))]
        return failures

    def _ack(self, message: Incoming) -> Verdict:
        self._failures.pop(message.place, None)
        return Ack()


BEAT: Final = 1.0
"""Seconds between two heartbeats to the broker while a handler runs."""
RENEWAL: Final = 60.0
"""Seconds between two checks of a busy process for old database connections."""


class Loop:
    """Takes messages from a transport until it gets a stop signal.

    Args:
        transport: the broker, not open yet.
        consumer: who handles the messages.
        options: the options.

    Raises:
        ImproperlyConfigured: the options do not fit the consumer, or it can handle no event.
    """

    def __init__(self, transport: Transport, consumer: Consumer, options: ConsumerOptions) -> None:
        options.check(consumer)
        consumer.validate()
        self._transport = transport
        self._options = options
        self._stop = options.stop or threading.Event()
        self._process = MessageProcessor(consumer, options)
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
                if not dead_letters.can_keep():
                    self._transport.validate_dead_letters()
                while not self._stop.is_set():
                    self._round()
                    failures = 0
            except self._transport.lost as error:
                failures += 1
                logger.warning(
                    "The consumer %s cannot reach its broker and will reconnect: %r",
                    self._name,
                    error,
                )
            finally:
                self._leave()
            if failures:
                self._sleep(self._options.pause_after(failures))

    def _round(self) -> None:
        self._alive()
        messages = self._transport.fetch(self._options.batch)
        if not messages or time.monotonic() - self._renewed > RENEWAL:
            self._renew()
        failures = 0
        while messages:
            messages, error = self._settled(messages, self._awaited(messages))
            if error is None:
                return
            failures += 1
            pause = self._options.pause_after(failures)
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

    def _settled(
        self, messages: Sequence[Incoming], verdicts: Sequence[Verdict]
    ) -> tuple[list[Incoming], Exception | None]:
        """Tell the broker of each message; those to be handed over again, and why."""
        done, kept = [], []
        problem: Exception | None = None
        refusal: Exception | None = None
        for message, verdict in zip(messages, verdicts, strict=True):
            match verdict:
                case Ack():
                    done.append(message)
                case Retry(seconds):
                    self._transport.postpone(message, seconds)
                case DeadLetter(error):
                    try:
                        self._transport.reject(message, error)
                    except self._transport.lost:
                        raise
                    except Exception as rejection:  # noqa: BLE001  # raised after its neighbours
                        refusal = refusal or rejection
                case WaitForDatabase(error):
                    kept.append(message)
                    problem = error
                case Stop(error):
                    refusal = refusal or error
                case _:
                    assert_never(verdict)
        self._transport.acknowledge(done)
        if refusal is not None:
            raise refusal
        return kept, problem

    def _awaited(self, messages: Sequence[Incoming]) -> list[Verdict]:
        """The verdicts of the other thread, with signs of life while it handles the messages."""
        future = self._handlers.submit(self._process, messages)
        started = time.monotonic()
        lost: BaseException | None = None
        while not wait([future], BEAT).done:
            if time.monotonic() - started > self._options.handler_timeout.total_seconds():
                continue
            self._alive()
            if lost is None:
                try:
                    self._transport.beat(messages)
                except self._transport.lost as error:
                    lost = error  # its effects are committed; it is delivered again
        verdicts = future.result()
        if lost is not None:
            raise lost
        return verdicts

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
        if self._options.health is not None:
            Path(self._options.health).touch()

    def _leave(self) -> None:
        try:
            self._transport.close()
        except self._transport.lost as error:
            logger.warning(
                "The consumer %s could not close its connection to the broker: %r",
                self._name,
                error,
            )
