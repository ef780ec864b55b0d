"""``manage.py run_consumer``"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Iterable
from importlib import import_module
from os.path import expandvars
from typing import Any, Final
from urllib.parse import urlsplit

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError

from .....management import stop_on_signals
from ...brokers.loop import ConsumerLoop, Source
from ...consumers import Consumer, consumers

BROKERS: Final = "idempotency_django.contrib.messaging.brokers"


class Command(BaseCommand):
    """Runs one consumer in this process."""

    help = (
        "Takes messages from a broker, passes them to a consumer, and acknowledges each after its "
        "commit. What cannot be handled becomes a dead letter in the admin. On SIGTERM, it "
        "finishes the current message and exits with 0."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "consumer",
            metavar="CONSUMER",
            help="The name of a consumer in IDEMPOTENCY['CONSUMERS'], such as billing.",
        )
        parser.add_argument(
            "--url",
            required=True,
            help="The broker: amqp://user:password@host//, redis://host/0 or kafka://host:9092. "
            "'$NAME' in quotes stands for the environment variable NAME; use it for passwords.",
        )
        parser.add_argument(
            "--from",
            dest="place",
            metavar="PLACE",
            help="The queue, or Kafka's topic; by default, it has the consumer's name.",
        )
        parser.add_argument(
            "--option",
            dest="pairs",
            metavar="NAME=VALUE",
            action="append",
            default=[],
            help="An option of kombu's transport, such as visibility_timeout=60, or of librdkafka, "
            "such as max.poll.interval.ms=600000. The value is JSON, or a string, where '$NAME' "
            "stands for a variable as well.",
        )
        parser.add_argument(
            "--health",
            metavar="FILE",
            default="",
            help="A file that is touched every few seconds, for a liveness probe.",
        )

    def handle(
        self, *, consumer: str, url: str, place: str | None, pairs: list[str], **more: Any
    ) -> None:
        try:
            found = _consumer(consumer)
            source = _source(found, expandvars(url), place or found.name, _options(pairs))
            with stop_on_signals() as stop:
                loop = ConsumerLoop(found, source, stop, health=more["health"])
                self.stdout.write(f"{found.name} takes messages from {source.place}.")
                loop.run()
        except ImproperlyConfigured as error:
            raise CommandError(str(error)) from error
        self.stdout.write(f"{found.name} has ended.")


def _consumer(name: str) -> Consumer:
    listed = consumers()
    try:
        return listed[name]
    except KeyError:
        raise CommandError(
            f"IDEMPOTENCY['CONSUMERS'] lists no consumer called {name!r}. It lists "
            f"{', '.join(sorted(listed)) or 'none'}."
        ) from None


def _source(consumer: Consumer, url: str, place: str, options: dict[str, Any]) -> Source:
    """Where the messages come from; only this broker's client library must be installed."""
    scheme = urlsplit(url).scheme
    try:
        if scheme == "kafka":
            kafka: Any = import_module(f"{BROKERS}.kafka")
            servers = url.removeprefix("kafka://").rstrip("/")
            usual = {"group.id": consumer.name, "auto.offset.reset": "earliest"}
            source: Source = kafka.KafkaSource(
                place, {"bootstrap.servers": servers, **usual, **options}
            )
        elif not scheme:
            raise KeyError("a variable of the environment is not set?")
        elif scheme == "sqs":
            raise CommandError(
                "run_consumer does not read from SQS. Receive its messages with boto3: the "
                "documentation has the loop (Consumers, boto3)."
            )
        else:
            kombu: Any = import_module(f"{BROKERS}.kombu")
            source = kombu.KombuSource(url, place, options)
    except (KeyError, ImportError) as error:  # kombu raises KeyError for a scheme without broker
        extra = "kafka" if scheme == "kafka" else "rabbitmq"
        raise CommandError(
            f"There is no broker for URLs that begin with '{scheme}:' ({error}). Write for example "
            f'amqp://host//, and run pip install "idempotency-django[{extra}]".'
        ) from error
    return source


def _options(pairs: Iterable[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for pair in pairs:
        name, sign, text = pair.partition("=")
        if not sign:
            raise CommandError(f"--option {pair} has no value. Write NAME=VALUE.")
        try:
            options[name] = json.loads(text)
        except ValueError:
            options[name] = expandvars(text)
    return options
