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


_PACKAGE: Final = __name__.rpartition(".")[0]

BROKERS: Final = {
    "celery": Broker(f"{_PACKAGE}.CeleryPublisher", "celery"),
    "http": Broker(f"{_PACKAGE}.HttpPublisher", "webhooks"),
    "kafka": Broker(f"{_PACKAGE}.KafkaPublisher", "kafka"),
    "kombu": Broker(f"{_PACKAGE}.KombuPublisher", "rabbitmq"),
    "local": Broker(f"{_PACKAGE}.LocalPublisher"),
}
"""The publishers of this package, by the names that ``BACKEND`` takes."""
