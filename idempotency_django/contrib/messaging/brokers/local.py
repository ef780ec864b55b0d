"""Consumers of the same project: a publisher that needs no broker."""

from __future__ import annotations

from collections.abc import Sequence

from ....engine import Plan
from ..consumers import consumer_at
from ..databases import reason
from ..errors import DeadLettered, UnknownEventType
from ..events import Event
from .base import HANDLER_OUTAGES, Publisher, Refused


class LocalPublisher(Publisher):
    """Gives each message to consumers in the process of the relay, one after the other.

    A message is sent once all of them have handled it. Where one fails, all get it again, and those
    that had handled it recognise it. Where one has dead-lettered it, it is dead here too. It fits
    tests, demos and small projects: no broker is needed.

    Args:
        topic: the topic.
        consumers: the paths of the consumers, such as ``["shop.consumers.billing"]``. Those that do
            not handle a type of events do not get it.

    Raises:
        ImproperlyConfigured: a path leads to no consumer.
        ValueError: there is none.
    """

    def __init__(self, topic: str, *, consumers: Sequence[str]) -> None:
        super().__init__(topic)
        self.consumers = [consumer_at(path) for path in consumers]
        if not consumers:
            raise ValueError("it has no consumers. List paths such as 'shop.consumers.billing'")

    def send(self, message: Event) -> None:
        handling = [each for each in self.consumers if each.handles(message.type)]
        if not handling:
            names = ", ".join(consumer.name for consumer in self.consumers)
            raise UnknownEventType(
                f"None of the consumers {names} handles {message.type!r}. Register a handler for "
                "this type, or publish to another topic."
            )
        for consumer in handling:
            try:
                # The claim is committed first, so that an attempt counts that ends the relay.
                consumer.handle(message, redelivered=True)
            except DeadLettered as error:
                why = f" The last error: {reason(error.__cause__)}" if error.__cause__ else ""
                raise Refused(f"{error}{why}", final=True) from error

    def is_outage(self, error: Exception) -> bool:
        return isinstance(error, HANDLER_OUTAGES)

    def plans(self, message: Event) -> list[Plan]:
        """The operations of the consumers that handle a message."""
        handling = [each for each in self.consumers if each.handles(message.type)]
        return [consumer.execution_of(message).plan for consumer in handling]
