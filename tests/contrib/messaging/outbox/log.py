"""A broker that is a file."""

from __future__ import annotations

import os
import random

from idempotency_django.contrib.messaging import Event, Publisher, Refused


class LogPublisher(Publisher):
    """Appends to a file, and refuses some."""

    def send(self, message: Event) -> None:
        if random.random() * int(os.environ["OUTBOX_REFUSED"]) < 1:
            raise Refused("refused")
        log = os.open(os.environ["OUTBOX_LOG"], os.O_WRONLY | os.O_APPEND)
        try:
            os.write(log, message.to_json().encode() + b"\n")
        finally:
            os.close(log)
