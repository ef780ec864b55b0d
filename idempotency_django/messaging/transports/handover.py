"""Hands messages to a consumer, in the thread that handlers run in."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Final

from django.db import DatabaseError, InterfaceError

from ...errors import OperationInProgress, StoreUnavailable, UnknownEventType
from .. import parking
from ..consumers import Consumer
from ..events import Event
from ..outcomes import Duplicate, Failed, Handled, Outcome
from .incoming import Incoming, event_of
from .options import Chosen
from .verdicts import Done, Later, Refused, Rejected, Unavailable, Verdict

logger = logging.getLogger("idempotency_django")

_DOWN: Final = (StoreUnavailable, DatabaseError, InterfaceError)
_REMEMBERED: Final = 10_000
"""Of how many messages to know the failures: SQS may deliver a message to somebody else next."""


@dataclass(frozen=True, slots=True)
class _Delivery:
    """A message that is an event, which the consumer can be called with."""

    message: Incoming
    event: Event
    sender: str = ""

    @property
    def arguments(self) -> dict[str, Any]:
        return {"sender": self.sender, "redelivered": self.message.redelivered}


class Handover:
    """Hands over messages of one transport to one consumer; says what is to be done with each.

    Args:
        consumer: the consumer.
        chosen: the loop's options.
    """

    def __init__(self, consumer: Consumer, chosen: Chosen) -> None:
        self._consumer = consumer
        self._chosen = chosen
        self._failures: dict[str, int] = {}

    def __call__(self, messages: Sequence[Incoming]) -> list[Verdict]:
        """Handle the messages in their order; the verdict on each."""
        read = [self._read(message) for message in messages]
        deliveries = [each for each in read if isinstance(each, _Delivery)]
        verdicts = iter(self._handled(deliveries))
        return [next(verdicts) if isinstance(each, _Delivery) else each for each in read]

    def _read(self, message: Incoming) -> _Delivery | Verdict:
        chosen = self._chosen
        try:
            if message.error is not None:
                raise message.error
            message.refuse_large(chosen.max_body_bytes)
            event = chosen.event(message.native) if chosen.event else event_of(message)
            sender = chosen.sender(message.native) if chosen.sender else ""
        except Exception as error:  # noqa: BLE001  # whatever a function of the project raises
            return self._kept(message, None, error)
        if event is None:
            return self._over(message)
        if message.place in self._failures:
            message = replace(message, redelivered=True)
        return _Delivery(message, event, sender)

    def _handled(self, deliveries: list[_Delivery]) -> list[Verdict]:
        """The verdicts on events; neighbours for whom the consumer is called alike are a batch."""
        verdicts: list[Verdict] = []
        for _, alike in groupby(deliveries, lambda delivery: delivery.arguments):
            batch = list(alike)
            outcomes = self._outcomes(batch)
            verdicts += map(self._verdict, batch, outcomes)
        return verdicts

    def _outcomes(self, batch: list[_Delivery]) -> list[Outcome]:
        if len(batch) > 1:
            events = [delivery.event for delivery in batch]
            return self._consumer.handle_many(events, **batch[0].arguments)
        [delivery] = batch
        try:
            return [self._consumer.handle(delivery.event, **delivery.arguments)]
        except Exception as error:  # noqa: BLE001  # it is this event's, whatever it is
            return [Failed(error)]

    def _verdict(self, delivery: _Delivery, outcome: Outcome) -> Verdict:
        message = delivery.message
        match outcome:
            case Handled() | Duplicate():
                return self._over(message)
            case Failed(StoreUnavailable() as error):
                return Unavailable(error)
            case Failed(UnknownEventType() as error):
                return self._unknown(delivery, error)
            case Failed(error) if outcome.rejected:
                return self._kept(message, delivery, error)
            case Failed(OperationInProgress()):
                return Later(self._soon(outcome.delay))
            case Failed(error):
                return self._failed(delivery, error)

    def _unknown(self, delivery: _Delivery, error: Exception) -> Verdict:
        match self._chosen.unknown:
            case "ignore":
                return self._over(delivery.message)
            case "stop":
                return Refused(error)
            case "park":
                return self._kept(delivery.message, delivery, error)

    def _failed(self, delivery: _Delivery, error: Exception) -> Verdict:
        """Another delivery may help, unless it was tried as often as the consumer allows.

        The consumer counts attempts by itself. What fails before an attempt begins it cannot count.
        """
        limit, failures = self._consumer.max_attempts, self._counted(delivery.message)
        logger.error(
            "The event %s of %s was not handled by the consumer %s.",
            delivery.event.id,
            delivery.event.source,
            self._consumer.name,
            exc_info=error,
        )
        if limit is not None and failures >= limit:
            return self._kept(delivery.message, delivery, error)
        return Later(self._chosen.pause_after(failures))

    def _kept(self, message: Incoming, delivery: _Delivery | None, error: Exception) -> Verdict:
        """Keep a message that cannot be handled, or have the broker keep it."""
        logger.error(
            "The message at %s cannot be handled by the consumer %s, and is set aside.",
            message.place,
            self._consumer.name,
            exc_info=error,
        )
        if not parking.can_park():
            self._over(message)
            return Rejected(error)
        try:
            self._park(message, delivery, error)
        except _DOWN as down:
            return self._not_kept(message, down)
        return self._over(message)

    def _not_kept(self, message: Incoming, error: Exception) -> Verdict:
        """Wait for the database, unless it is the message that it does not take.

        Such a message must not hold up all others, and must not be lost either.
        """
        if not parking.takes_others(self._consumer):
            return Unavailable(error)
        logger.error(
            "The message at %s (%d bytes) cannot be parked: the database takes others, but not "
            "this one: %s. It stays at its broker, and is tried again. If it is too large, raise "
            "the database's limit (max_allowed_packet of MariaDB and MySQL).",
            message.place,
            len(message.body),
            error,
        )
        return Later(self._chosen.pause_after(self._counted(message)))

    def _counted(self, message: Incoming) -> int:
        """How often the message has failed here, with this time."""
        failures = self._failures[message.place] = self._failures.pop(message.place, 0) + 1
        while len(self._failures) > _REMEMBERED:
            del self._failures[next(iter(self._failures))]
        return failures

    def _park(self, message: Incoming, delivery: _Delivery | None, error: Exception) -> None:
        if delivery is not None:
            try:
                parking.park(self._consumer, delivery.event, error, sender=delivery.sender)
            except (ValueError, TypeError):  # data that a function of the project made
                delivery = None
        if delivery is None:
            texts = message.texts
            parking.park_raw(self._consumer, message.place, message.body, error, texts)

    def _over(self, message: Incoming) -> Verdict:
        self._failures.pop(message.place, None)
        return Done()

    def _soon(self, remaining: float | None) -> float:
        chosen = self._chosen
        return chosen.pause if remaining is None else max(0.1, min(remaining, chosen.longest_pause))
