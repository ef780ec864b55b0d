"""One module for each broker, with its publisher and its transport, and a table of them."""

from __future__ import annotations

from typing import Final, NamedTuple


class Broker(NamedTuple):
    """A broker: the path of its publisher, and the extra with its client library.

    Attributes:
        publisher: the path of its publisher's class.
        extra: the extra of this package that its client library comes with.
        has_consumer: whether the module has a function ``run_consumer()`` as well.
    """

    publisher: str
    extra: str = ""
    has_consumer: bool = False


BROKERS: Final = {
    "celery": Broker(f"{__name__}.celery.CeleryPublisher", "celery"),
    "http": Broker(f"{__name__}.http.HttpPublisher", "webhooks"),
    "kafka": Broker(f"{__name__}.kafka.KafkaPublisher", "kafka", has_consumer=True),
    "local": Broker(f"{__name__}.local.LocalPublisher"),
    "rabbitmq": Broker(f"{__name__}.rabbitmq.KombuPublisher", "rabbitmq", has_consumer=True),
    "sqs": Broker(f"{__name__}.sqs.SqsPublisher", "sqs", has_consumer=True),
}
"""The brokers that this package knows, by the names that ``BACKEND`` and ``--transport`` take."""
