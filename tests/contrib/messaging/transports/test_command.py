"""``manage.py run_consumer`` and the checks of the consumers that it finds."""

from __future__ import annotations

import sys
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from idempotency_django.contrib.messaging import Consumer
from idempotency_django.contrib.messaging.brokers.kafka import KafkaSource
from idempotency_django.contrib.messaging.management.commands import run_consumer

pytestmark = pytest.mark.django_db

first, second, same = Consumer("first"), Consumer("second.one"), Consumer("first")
HERE = __name__


@pytest.fixture(autouse=True)
def listed(settings: Any) -> None:
    """Two consumers in the settings."""
    settings.IDEMPOTENCY = {"CONSUMERS": [f"{HERE}.first", f"{HERE}.second"]}


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The consumers, sources and options of the loops; they do nothing."""
    made: list[tuple[Any, ...]] = []

    class Loop:
        def __init__(self, consumer: Any, source: Any, stop: Any, **options: Any) -> None:
            made.append((consumer, source, options))

        def run(self) -> None: ...

    monkeypatch.setattr(run_consumer, "ConsumerLoop", Loop)
    return made


def run(*words: str) -> str:
    """Call the command; what it wrote."""
    written = StringIO()
    call_command("run_consumer", *words, stdout=written)
    return written.getvalue()


KAFKA = "--url=kafka://one:9092,two:9092"


def test_kafka(loops: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON, texts and variables of the environment become options of librdkafka."""
    monkeypatch.setenv("SASL_PASSWORD", "123")
    written = run(
        *("first", KAFKA, "--from=orders", "--health=/run/health"),
        *("--option=sasl.password=$SASL_PASSWORD", "--option=max.poll.interval.ms=600000"),
    )
    [(consumer, source, options)] = loops
    assert consumer is first
    assert isinstance(source, KafkaSource)
    assert source.place == "orders"
    assert source._config == {
        "bootstrap.servers": "one:9092,two:9092",
        "group.id": "first",
        "auto.offset.reset": "earliest",
        "sasl.password": "123",
        "max.poll.interval.ms": 600_000,
        "enable.auto.commit": False,
    }
    assert options == {"health": "/run/health"}
    assert written == "first takes messages from orders.\nfirst has ended.\n"


def test_names(loops: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer is found by its name, which its queue has, too."""
    monkeypatch.setenv("BROKER_URL", "redis://mq/0")
    run("second.one", "--url=$BROKER_URL", "--option=visibility_timeout=60")
    [(consumer, source, options)] = loops
    assert (consumer, source.place) == (second, "second.one")
    assert source._connection.hostname == "mq"
    limits = {"socket_timeout": 10, "socket_connect_timeout": 10}
    assert source._connection.transport_options == {"visibility_timeout": 60, **limits}
    assert options == {"health": ""}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["frist", KAFKA], "no consumer called 'frist'. It lists first, second.one"),
        (["first"], "--url"),
        (["first", "--url=kafka://"], "no 'bootstrap.servers'"),
        (["first", "--url=rabbit://host"], "no broker for URLs that begin with 'rabbit:'"),
        (["first", KAFKA, "--option=batch"], "has no value. Write NAME=VALUE"),
        (["first", "--url=sqs://"], "does not read from SQS. Receive its messages with boto3"),
        (["first", "--url=$NOWHERE"], "no broker for URLs that begin with ':'"),
    ],
)
def test_refused(loops: list[Any], words: list[str], text: str) -> None:
    """A command line that cannot be used says what to write instead; nothing runs."""
    with pytest.raises(CommandError, match=text.replace("?", r"\?")):
        run(*words)
    assert loops == []


def test_the_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its client library, a broker's URL names the extra to install."""
    monkeypatch.delitem(sys.modules, "idempotency_django.contrib.messaging.brokers.kafka", False)
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with pytest.raises(CommandError, match=r'pip install "idempotency-django\[kafka\]"'):
        run("first", KAFKA)
