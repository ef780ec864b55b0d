"""Consumers of the same project: a publisher that needs no broker."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from django.core.checks import CheckMessage, Error
from django.core.exceptions import ImproperlyConfigured

from ..consumers import Consumer, consumer_at
from ..databases import reason
from ..dead_letters import release
from ..errors import DeadLettered, UnknownEventType
from .base import Outgoing, Publisher, Refused, result_of


class LocalPublisher(Publisher):
    """Gives each message to consumers in the process of the relay, one after the other.

    A message is sent once all of them have handled it. Where one fails, all get it again, and those
    that had handled it recognise it. Where one has dead-lettered it, it is dead here too, or
    discarded, as the topic says. It fits tests, demos and small projects: no broker is needed.

    Args:
        topic: the topic.
        consumers: the paths of the consumers, such as ``["shop.consumers.billing"]``. Those that do
            not handle a type of events do not get it.
    """

    def __init__(self, topic: str, *, consumers: Sequence[str], **options: Any) -> None:
        super().__init__(topic)
        if options:
            unknown = ", ".join(map(repr, options))
            raise TypeError(f"LocalPublisher has no option {unknown}. Its option is 'consumers'")
        self._paths = consumers

    @cached_property
    def consumers(self) -> list[Consumer]:
        """The consumers."""
        return [consumer_at(path) for path in self._paths]

    def send(self, message: Outgoing) -> Exception | None:
        consumers = self.consumers

        def handle() -> None:
            event = message.event(self.source)
            handling = [consumer for consumer in consumers if consumer.handles(event.type)]
            if not handling:
                raise UnknownEventType(
                    f"None of the consumers {', '.join(self._paths)} handles {event.type!r}. "
                    "Register a handler for this type, or publish to another topic."
                )
            for consumer in handling:
                # The claim is committed first, so that an attempt counts that ends the relay.
                consumer.handle(event, redelivered=True)

        error = result_of(handle)
        if isinstance(error, DeadLettered):
            why = f" The last error: {reason(error.__cause__)}" if error.__cause__ else ""
            return Refused(f"{error}{why}", final=True)
        return error

    def release(self, message: Outgoing, by: str) -> None:
        """Release the records of the consumers that dead-lettered a message: it is retried.

        Args:
            message: the message.
            by: the operator who retries it.
        """
        event = message.event(self.source)
        for consumer in self.consumers:
            if consumer.handles(event.type):
                release(consumer.record_of(event), by)

    def check(self) -> list[CheckMessage]:
        try:
            return [] if self.consumers else [self._wrong("no consumers are listed")]
        except ImproperlyConfigured as error:
            return [self._wrong(str(error))]

    def _wrong(self, why: str) -> CheckMessage:
        return Error(
            f"The topic {self.topic!r} of the outbox has no consumers: {why}",
            hint="List consumers in IDEMPOTENCY['OUTBOX'], such as "
            "'OPTIONS': {'consumers': ['shop.consumers.billing']}.",
            id="idempotency_django.E043",
        )
