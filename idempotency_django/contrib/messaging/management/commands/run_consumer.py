"""``manage.py run_consumer``"""

from __future__ import annotations

import inspect
import json
import os
from argparse import ArgumentParser
from collections.abc import Callable, Iterable
from dataclasses import fields
from datetime import timedelta
from importlib import import_module
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError
from django.utils.module_loading import import_string

from .....conf import did_you_mean
from .....errors import UnknownEventType
from ...brokers import BROKERS
from ...brokers.loop import ConsumerOptions
from ...consumers import Consumer, consumer_at, consumers

TRANSPORTS: Final = [name for name, broker in BROKERS.items() if broker.has_consumer]
_FUNCTIONS: Final = ("event", "sender")
_FROM_ENVIRONMENT: Final = "env:"


class Command(BaseCommand):
    """Runs one consumer in this process."""

    help = (
        "Takes messages from a broker and passes them to a consumer. On SIGTERM, it finishes the "
        "current message and exits with 0. It exits with 1 after a permanent error."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "consumer",
            metavar="CONSUMER",
            help="The name of a consumer in IDEMPOTENCY['CONSUMERS'], or the path of any consumer, "
            "such as shop.consumers.billing.",
        )
        parser.add_argument("--transport", required=True, choices=TRANSPORTS)
        parser.add_argument(
            "--from",
            dest="places",
            metavar="PLACE",
            action="append",
            required=True,
            help="The source of the messages: a Kafka topic (can be repeated), a RabbitMQ queue, "
            "or the URL of an SQS queue.",
        )
        parser.add_argument(
            "--option",
            dest="settings_",
            metavar="NAME=VALUE",
            action="append",
            default=[],
            help="An argument of the broker's run_consumer(), such as batch=100, or a member of a "
            "dict, such as config.bootstrap.servers=kafka:9092. The value env:NAME reads the "
            "environment variable NAME; use it for passwords. Durations are in seconds.",
        )
        parser.add_argument(
            "--declare",
            action="store_true",
            help="RabbitMQ: declare the queue and the queue of the option dead_letter, as the "
            "outbox does, and add the bindings of --option bindings.EXCHANGE=KEY.",
        )
        parser.add_argument(
            "--health",
            metavar="FILE",
            help="A file that is touched every few seconds, for a liveness probe.",
        )

    def handle(
        self, *, consumer: str, transport: str, places: list[str], settings_: list[str], **more: Any
    ) -> None:
        try:
            run = _run_of(transport)
            options = _options(settings_)
            if more["declare"]:
                options["declare"] = True
            if more["health"]:
                options["health"] = more["health"]
            _check_names(run, options, transport)
            _read_durations(run, options)
            found, place = _consumer(consumer), _place(transport, places)
            self.stdout.write(f"{found.name} takes messages from {', '.join(places)}.")
            run(found, place, **options)
            self.stdout.write(f"{found.name} has ended.")
        except (ImproperlyConfigured, UnknownEventType) as error:
            raise CommandError(str(error)) from error


def _consumer(name: str) -> Consumer:
    listed = consumers()
    if name in listed:
        return listed[name]
    if "." in name or ":" in name:
        return consumer_at(name)
    hint = did_you_mean(name, listed, "It lists") if listed else "It lists none."
    raise CommandError(f"IDEMPOTENCY['CONSUMERS'] lists no consumer called {name!r}. {hint}")


def _run_of(transport: str) -> Callable[..., None]:
    """The transport's function; only its own client library must be installed."""
    module = BROKERS[transport].publisher.rpartition(".")[0]
    try:
        run: Callable[..., None] = import_module(module).run_consumer
    except ImportError as error:
        raise CommandError(
            f"The transport {transport!r} needs a missing library: {error}. Run pip install "
            f'"idempotency-django[{BROKERS[transport].extra}]".'
        ) from error
    return run


def _place(transport: str, places: list[str]) -> str | list[str]:
    if transport == "kafka":
        return places
    if len(places) > 1:
        raise CommandError(
            "One process reads from one queue. Give --from once, and start another process for "
            "each of the other queues."
        )
    return places[0]


def _options(pairs: Iterable[str]) -> dict[str, Any]:
    """The arguments that the command line gives."""
    options: dict[str, Any] = {}
    for pair in pairs:
        name, sign, text = pair.partition("=")
        if not sign:
            raise CommandError(f"--option {pair} has no value. Write NAME=VALUE.")
        name, _, member = name.partition(".")
        value = _function(name, text) if name in _FUNCTIONS else _value(text)
        if member:
            options.setdefault(name, {})[member] = value
        else:
            options[name] = value
    return options


def _function(name: str, path: str) -> Any:
    try:
        return import_string(path)
    except ImportError as error:
        raise CommandError(
            f"--option {name}={path} is not the path of a function: {error}"
        ) from error


def _value(text: str) -> Any:
    """The value as JSON, or the text itself."""
    if text.startswith(_FROM_ENVIRONMENT):
        name = text.removeprefix(_FROM_ENVIRONMENT)
        if name not in os.environ:
            raise CommandError(f"The environment variable {name} is not set.")
        return os.environ[name]
    try:
        return json.loads(text)
    except ValueError:
        return text


def _check_names(run: Callable[..., None], options: dict[str, Any], transport: str) -> None:
    own = inspect.signature(run).parameters.values()
    mine = {each.name for each in own if each.kind is each.KEYWORD_ONLY}
    known = {*mine, *(each.name for each in fields(ConsumerOptions))} - {"stop"}
    for name in options.keys() - known:
        hint = did_you_mean(name, known)
        raise CommandError(f"The transport {transport!r} has no option {name!r}. {hint}")
    for each in own:
        if each.name in mine - options.keys() and each.default is each.empty:
            raise CommandError(
                f"The transport {transport!r} needs the option {each.name!r}: --option "
                f"{each.name}=…, or {each.name}.NAME=… if it is a dict."
            )


def _read_durations(run: Callable[..., None], options: dict[str, Any]) -> None:
    """Turn the numbers of seconds among the options into what ``run`` takes."""
    parameters = inspect.signature(run).parameters
    defaults = {name: each.default for name, each in parameters.items()}
    defaults |= {each.name: each.default for each in fields(ConsumerOptions)}
    for name, value in options.items():
        if isinstance(defaults.get(name), timedelta) and isinstance(value, int | float):
            options[name] = timedelta(seconds=value)
