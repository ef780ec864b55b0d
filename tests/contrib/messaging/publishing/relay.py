"""A relay in a process of its own, which may die; it is started with ``TOPICS KILL``.

``TOPICS`` is the setting ``OUTBOX``, as JSON. With ``KILL``, the process is killed when the
broker has confirmed the first batch, before anything is noted.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import django


def main(topics: str, kill: str = "") -> None:
    """Send what is there."""
    django.setup()
    from django.conf import settings

    from idempotency_django.contrib.messaging import Batch, Publisher, Relay
    from idempotency_django.contrib.messaging.outbox.topics import Topic

    settings.IDEMPOTENCY = {"OUTBOX": json.loads(topics)}
    if kill:
        made = Topic.publisher

        def fatal(topic: Topic) -> Publisher:
            publisher = made(topic)
            send = publisher.publish

            def publish(batch: Batch) -> None:
                send(batch)
                assert [*batch.results.values()] == [None] * len(batch.messages)
                os.kill(os.getpid(), signal.SIGKILL)
                raise AssertionError

            publisher.publish = publish  # type: ignore[method-assign]
            return publisher

        Topic.publisher = fatal  # type: ignore[method-assign]
    relay = Relay()
    relay.drain()
    relay.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
