"""A broker that is a file."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

from idempotency_django.messaging.brokers.base import Outgoing, Publisher, in_order


class LogPublisher(Publisher):
    """Appends to a file, and refuses some."""

    def publish(self, messages: Sequence[Outgoing]) -> list[Exception | None]:
        log = os.open(os.environ["OUTBOX_LOG"], os.O_WRONLY | os.O_APPEND)
        try:
            return in_order(messages, lambda message: self._append(log, message))
        finally:
            os.close(log)

    def _append(self, log: int, message: Outgoing) -> Exception | None:
        if random.random() * int(os.environ["OUTBOX_REFUSED"]) < 1:
            return ValueError("refused")
        os.write(log, message.event(self.source).to_json().encode() + b"\n")
        return None
