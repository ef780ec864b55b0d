"""One module for each publisher, the loop of ``run_consumer``, and a table of the publishers."""

from __future__ import annotations

from typing import Final, NamedTuple


class Broker(NamedTuple):
    """A publisher that this package has.

    Attributes:
        publisher: the path of its class.
        extra: the extra of this package that its client library comes with.
    """

    publisher: str
    extra: str = ""


BROKERS: Final = {
    "celery": Broker(f"{__name__}.celery.CeleryPublisher", "celery"),
    "http": Broker(f"{__name__}.http.HttpPublisher", "webhooks"),
    "kafka": Broker(f"{__name__}.kafka.KafkaPublisher", "kafka"),
    "kombu": Broker(f"{__name__}.kombu.KombuPublisher", "rabbitmq"),
    "local": Broker(f"{__name__}.local.LocalPublisher"),
}
"""The publishers of this package, by the names that ``BACKEND`` takes."""
