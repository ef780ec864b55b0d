"""A relay in a process of its own, which may die; its argument is the setting OUTBOX, as JSON."""

from __future__ import annotations

import json
import sys

import django


def main(topics: str) -> None:
    """Send what is there."""
    django.setup()
    from django.conf import settings

    from idempotency_django.contrib.messaging import Relay

    settings.IDEMPOTENCY = {"OUTBOX": json.loads(topics)}
    relay = Relay()
    relay.drain()
    relay.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
