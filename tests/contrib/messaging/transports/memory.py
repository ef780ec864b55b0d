"""A broker in memory, whose source notes what the loop does."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from idempotency_django.contrib.messaging import Consumer, Event
from idempotency_django.contrib.messaging.brokers.loop import ConsumerLoop, Incoming


class Lost(Exception):
    """The broker is away."""


class Memory:
    """Delivers messages once, and stops the loop when there are no more.

    Args:
        messages: what it delivers.
        redelivered: the ids of events that it may have delivered before.

    Attributes:
        done: what the loop did, in order; beats are not noted.
        when: called before something is done, by its name; may raise.
    """

    place = "memory"

    def __init__(self, *messages: Event | bytes, redelivered: Sequence[str] = ()) -> None:
        self.stop = threading.Event()
        self.waiting = deque(messages)
        self.redelivered = redelivered
        self.done: list[str] = []
        self.when: dict[str, Callable[[], None]] = {}

    def run(self, consumer: Consumer, **options: object) -> list[str]:
        """Run the loop; what it did."""
        ConsumerLoop(consumer, self, self.stop, **options).run()
        return self.done

    def note(self, *what: str) -> None:
        """Note what the loop does."""
        self.done.append(" ".join(what))
        if what[0] in self.when:
            self.when[what[0]]()

    def open(self) -> None:
        self.note("open")

    def receive(self) -> Incoming | None:
        if not self.waiting:
            self.stop.set()
            return None
        event = self.waiting.popleft()
        body = event if isinstance(event, bytes) else event.to_json().encode()
        place = "?" if isinstance(event, bytes) else event.id
        is_again = place in self.redelivered
        return Incoming(place, body, [], is_again, partial(self.note, "acknowledge", place))

    def beat(self) -> None:
        self.when.get("beat", lambda: None)()

    def close(self) -> None:
        self.note("close")
