"""The queues of RabbitMQ as this package declares them: the extra ``[rabbitmq]``."""

from __future__ import annotations

import kombu


def quorum_queue(name: str) -> kombu.Queue:
    """A durable quorum queue; publishers and consumers declare the same one."""
    return kombu.Queue(name, durable=True, queue_arguments={"x-queue-type": "quorum"})


def topic_exchange(name: str) -> kombu.Exchange:
    """A durable topic exchange, likewise."""
    return kombu.Exchange(name, type="topic", durable=True)
