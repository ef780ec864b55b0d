"""The options that all transports have."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, TypedDict, get_args

from django.core.exceptions import ImproperlyConfigured

from ..consumers import Consumer
from ..events import Event

Unknown = Literal["park", "ignore", "stop"]

_LARGEST_POWER: Final = 32  # 2 ** 32 pauses are longer than any


class Options(TypedDict, total=False):
    """The options that all transports have.

    Attributes:
        batch: how many messages to handle in one transaction, if so many are there (default: 1).
            The order of messages is kept if it is 1; otherwise a message that fails is handled
            after those that came with it.
        event: makes an :class:`~idempotency_django.messaging.events.Event` of the message of the
            broker's client library; ``None``: skip the message. By default the message is a
            CloudEvent.
        sender: says who sent the message of the broker's client library, as the broker has
            authenticated them; for a federated consumer.
        max_body_bytes: how large the body of a message may be, inflated (default: 5 MiB). A larger
            one is set aside unread.
        unknown: what to do with an event for which the consumer has no handler: ``"park"``
            (default), ``"ignore"``: acknowledge it, or ``"stop"``: end with an error, and leave it.
        pause: seconds before a message that failed is delivered again, doubled at each failure
            (default: 1).
        longest_pause: the upper limit of these seconds (default: 60).
        patience: seconds that handling a batch may take (default: 900). After that, the process
            does not renew its claim on the messages, nor touch the health file.
        health: the path of a file that is touched at least every few seconds, for probes.
        stop: the loop ends after it is set. SIGTERM and SIGINT set it, too.
    """

    batch: int
    event: Callable[[Any], Event | None] | None
    sender: Callable[[Any], str] | None
    max_body_bytes: int
    unknown: Unknown
    pause: float
    longest_pause: float
    patience: float
    health: str | os.PathLike[str] | None
    stop: threading.Event | None


@dataclass(frozen=True, slots=True)
class Chosen:
    """The options of one loop, each with its value; see :class:`Options`."""

    batch: int = 1
    event: Callable[[Any], Event | None] | None = None
    sender: Callable[[Any], str] | None = None
    max_body_bytes: int = 5 * 1024 * 1024
    unknown: Unknown = "park"
    pause: float = 1.0
    longest_pause: float = 60.0
    patience: float = 900.0
    health: str | os.PathLike[str] | None = None
    stop: threading.Event | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "max_body_bytes"):
            value = getattr(self, name)
            if not (isinstance(value, int) and value >= 1):
                raise ImproperlyConfigured(f"{name} is {value!r}; make it 1 or more.")
        if self.unknown not in get_args(Unknown):
            raise ImproperlyConfigured(
                f"unknown is {self.unknown!r}; make it one of {', '.join(get_args(Unknown))}."
            )
        for name in ("pause", "longest_pause", "patience"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and value > 0):
                raise ImproperlyConfigured(f"{name} is {value!r}; make it a number of seconds.")

    def check(self, consumer: Consumer) -> None:
        """Refuse a consumer that these options do not fit.

        Raises:
            ImproperlyConfigured: no event could be handled.
        """
        if consumer.federated and self.sender is None:
            raise ImproperlyConfigured(
                f"The consumer {consumer.name!r} is federated, so the transport must know who sent "
                "a message. Pass sender=, a function that takes the broker's message."
            )
        if self.sender is not None and not consumer.federated:
            raise ImproperlyConfigured(
                f"The consumer {consumer.name!r} is not federated. Leave out sender=, or make it a "
                "Consumer(…, federated=True)."
            )

    def pause_after(self, failures: int) -> float:
        """Seconds to wait after so many failures, one after the other."""
        power = min(failures - 1, _LARGEST_POWER)
        return float(min(self.longest_pause, self.pause * 2**power))
