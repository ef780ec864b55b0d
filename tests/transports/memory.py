"""A broker in memory, whose transport notes what the loop does."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import ClassVar

from idempotency_django.contrib.messaging import Consumer, Event
from idempotency_django.contrib.messaging.brokers.loop import (
    ConsumerOptions,
    Incoming,
    Loop,
    Transport,
)


class Lost(Exception):
    """The broker is away."""


class Memory(Transport):
    """Delivers messages once, and stops the loop when there are no more.

    Attributes:
        done: what the loop did, in order.
        when: called before something is done, by its name; may raise.
    """

    name: ClassVar[str] = "memory"
    lost: ClassVar[tuple[type[BaseException], ...]] = (Lost,)

    def __init__(self, *messages: Incoming) -> None:
        self.stop = threading.Event()
        self.waiting = deque(messages)
        self.done: list[str] = []
        self.when: dict[str, Callable[[], None]] = {}

    def run(self, consumer: Consumer, **options: object) -> list[str]:
        """Run the loop; what it did."""
        moment = timedelta(milliseconds=10)
        settings_ = ConsumerOptions(
            **{"pause": moment, "longest_pause": moment, "stop": self.stop, **options}
        )
        Loop(self, consumer, settings_).run()
        return self.done

    def note(self, what: str, *messages: Incoming) -> None:
        """Note what the loop does."""
        self.done.append(" ".join([what, *(message.place for message in messages)]))
        if what in self.when:
            self.when[what]()

    def open(self) -> None:
        self.note("open")

    def validate_dead_letters(self) -> None:
        """It keeps everything."""

    def fetch(self, limit: int) -> list[Incoming]:
        if not self.waiting:
            self.stop.set()
        return [self.waiting.popleft() for _ in range(min(limit, len(self.waiting)))]

    def beat(self, messages: Sequence[Incoming]) -> None:
        self.note("beat", *messages)

    def acknowledge(self, messages: Sequence[Incoming]) -> None:
        if messages:
            self.note("acknowledge", *messages)

    def postpone(self, message: Incoming, seconds: float) -> None:
        self.note("postpone", message)

    def reject(self, message: Incoming, error: Exception) -> None:
        self.note("reject", message)

    def release(self, messages: Sequence[Incoming]) -> None:
        self.note("release", *messages)

    def close(self) -> None:
        self.note("close")


def message(event: Event | bytes, place: str = "", *, redelivered: bool = False) -> Incoming:
    """A message, as a transport delivers it."""
    body = event if isinstance(event, bytes) else event.to_json().encode()
    place = place or ("?" if isinstance(event, bytes) else event.id)
    return Incoming(place, body, [], redelivered, (event, place))
