"""``manage.py run_consumer`` and the checks of the consumers that it finds."""

from __future__ import annotations

import json
import sys
import threading
import uuid
from datetime import timedelta
from io import StringIO
from typing import Any

import kombu
import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command

from idempotency_django.checks.consumers import check_consumers
from idempotency_django.contrib.messaging import Consumer, KombuPublisher
from idempotency_django.contrib.messaging.brokers import kafka, rabbitmq, sqs
from idempotency_django.errors import UnknownEventType
from tests.publishing.messages import grouped
from tests.servers import Server

first, second, same = Consumer("first"), Consumer("second.one"), Consumer("first")
HERE = __name__


@pytest.fixture(autouse=True)
def listed(settings: Any) -> None:
    """Two consumers in the settings."""
    settings.IDEMPOTENCY = {"CONSUMERS": [f"{HERE}.first", f"{HERE}:second"]}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """How the transports were called; they do nothing."""
    made: list[tuple[Any, ...]] = []

    def run_kafka(consumer: Any, topics: Any, *, config: Any, dead_letter: Any = None, **options):
        made.append((consumer, topics, {"config": config, **options}))

    def run_queue(consumer: Any, queue: Any, *, url: Any, **options: Any) -> None:
        made.append((consumer, queue, {"url": url, **options}))

    monkeypatch.setattr(kafka, "run_consumer", run_kafka)
    monkeypatch.setattr(rabbitmq, "run_consumer", run_queue)
    return made


def run(*words: str) -> str:
    """Call the command; what it wrote."""
    written = StringIO()
    call_command("run_consumer", *words, stdout=written)
    return written.getvalue()


KAFKA = ["--transport=kafka", "--from=orders"]
SERVERS = "--option=config.bootstrap.servers=kafka:9092"


def test_kafka(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Members of a dict, JSON, seconds and variables of the environment become arguments."""
    monkeypatch.setenv("SASL_PASSWORD", "123")
    written = run(
        *("first", *KAFKA, "--from=refunds", SERVERS, "--health=/run/health"),
        *("--option=config.sasl.password=env:SASL_PASSWORD", "--option=batch=100"),
        *("--option=unknown=ignore", "--option=event=json.loads", "--option=pause=2.5"),
    )
    [(consumer, topics, options)] = calls
    assert consumer is first
    assert topics == ["orders", "refunds"]
    assert options == {
        "config": {"bootstrap.servers": "kafka:9092", "sasl.password": "123"},
        "batch": 100,
        "unknown": "ignore",
        "event": json.loads,
        "pause": timedelta(seconds=2.5),
        "health": "/run/health",
    }
    assert written == "first takes messages from orders, refunds.\nfirst has ended.\n"


@pytest.mark.parametrize("name", ["second.one", f"{HERE}.second", f"{HERE}:second"])
def test_names(calls: list[Any], name: str) -> None:
    """A consumer is found by its name, or by its path."""
    run(name, "--transport=rabbitmq", "--from=orders", "--option=url=amqp://mq")
    assert calls == [(second, "orders", {"url": "amqp://mq"})]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["frist", *KAFKA, SERVERS], "no consumer called 'frist'. Did you mean 'first'?"),
        ([f"{HERE}.none", *KAFKA, SERVERS], "There is no consumer at"),
        (["first", *KAFKA], "needs the option 'config'"),
        (["first", *KAFKA, SERVERS, "--option=bach=1"], "Did you mean 'batch'?"),
        (["first", *KAFKA, SERVERS, "--option=stop=1"], "has no option 'stop'"),
        (["first", *KAFKA, SERVERS, "--option=batch"], "has no value. Write NAME=VALUE"),
        (["first", *KAFKA, SERVERS, "--option=event=a.b"], "is not the path of a function"),
        (["first", *KAFKA, "--option=batch=env:NOWHERE"], "NOWHERE is not set"),
        (
            ["first", "--transport=rabbitmq", "--from=a", "--from=b", "--option=url=x"],
            "One process reads from one queue",
        ),
    ],
)
def test_refused(calls: list[Any], words: list[str], text: str) -> None:
    """A command line that cannot be used says what to write instead; nothing runs."""
    with pytest.raises(CommandError, match=text.replace("?", r"\?")):
        run(*words)
    assert calls == []


def test_none_are_listed(calls: list[Any], settings: Any) -> None:
    """Without a list, only a path leads to a consumer."""
    settings.IDEMPOTENCY = {}
    with pytest.raises(CommandError, match=r"no consumer called 'first'\. It lists none"):
        run("first", *KAFKA, SERVERS)


def test_the_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its client library, a transport names the extra to install."""
    monkeypatch.delitem(sys.modules, sqs.__name__)
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(CommandError, match=r'pip install "idempotency-django\[sqs\]"'):
        run("first", "--transport=sqs", "--from=https://sqs/queue")


def test_a_loop_that_cannot_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends the loop is told without a traceback."""

    def refuse(consumer: Any, topics: Any, *, config: Any) -> None:
        raise UnknownEventType("order.lost")

    monkeypatch.setattr(kafka, "run_consumer", refuse)
    with pytest.raises(CommandError, match=r"order\.lost"):
        run("first", *KAFKA, SERVERS)


@pytest.mark.parametrize(
    ("function", "arguments", "text"),
    [
        (kafka.run_consumer, {"topics": "orders", "config": {}}, "it must be a list of topics"),
        (kafka.run_consumer, {"topics": ["orders"], "config": {}}, "no 'bootstrap.servers'"),
        (sqs.run_consumer, {"url": "x", "batch": 11}, "SQS returns 10 at most"),
        (sqs.run_consumer, {"url": "x", "wait": timedelta(seconds=21)}, "it must be 1 to 20"),
        (sqs.run_consumer, {"url": "x", "wait": 1}, "must be a timedelta"),
        (sqs.run_consumer, {"url": "x", "visibility": timedelta(seconds=1)}, "must be 3 to 43200"),
        (rabbitmq.run_consumer, {"queue": "x", "url": "", "prefetch": 5, "batch": 9}, "must be 9"),
        (
            rabbitmq.run_consumer,
            {"queue": "x", "url": "", "heartbeat": timedelta(seconds=1)},
            "must be 3 or more",
        ),
    ],
)
def test_arguments(function: Any, arguments: dict[str, Any], text: str) -> None:
    """Arguments that cannot be used are refused before a connection is made."""
    with pytest.raises(ImproperlyConfigured, match=text):
        function(first, **arguments)


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        ([f"{HERE}.first", f"{HERE}.second"], []),
        ([f"{HERE}.first", f"{HERE}:first"], []),
        ([f"{HERE}.none", "none.at.all"], ["no consumer at", "no consumer at"]),
        ([f"{HERE}.KAFKA"], ["KAFKA"]),
        ([f"{HERE}.first", f"{HERE}.same"], ["lists two consumers called"]),
        ("not a list", []),  # E002
    ],
)
def test_checks(settings: Any, paths: Any, said: list[str]) -> None:
    """Each path leads to a consumer, and each consumer has a name of its own."""
    settings.IDEMPOTENCY = {"CONSUMERS": paths}
    problems = check_consumers()
    assert [problem.id for problem in problems] == ["idempotency_django.E050"] * len(said)
    assert all(text in problem.msg for text, problem in zip(said, problems, strict=True))


def test_no_region(monkeypatch: pytest.MonkeyPatch) -> None:
    """SQS without a region cannot be reached, ever: the command ends, and says how to name one."""
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    with pytest.raises(CommandError, match=r"client\.region_name=eu-central-1"):
        run("first", "--transport=sqs", "--from=https://sqs.example/1/billing")


@pytest.mark.django_db(transaction=True)
def test_declare(rabbit: Server) -> None:
    """--declare makes the queues and bindings of the outbox's publisher: either may be the first,
    and what is published arrives.
    """
    name, exchange, stop = uuid.uuid4().hex, uuid.uuid4().hex, threading.Event()
    declared = {"url": rabbit.url, "declare": True, "dead_letter": f"{name}.dead", "stop": stop}
    direct = KombuPublisher("orders", url=rabbit.url, queue=name)
    fanned = KombuPublisher("orders", url=rabbit.url, exchange=exchange)
    got: list[str] = []
    consumer = Consumer("declaring")

    @consumer.on("order.paid")
    def handle(event: Any, execution: Any) -> None:
        got.append(event.id)
        stop.set()

    with pytest.raises(ImproperlyConfigured, match="run_consumer --declare"):
        rabbitmq.run_consumer(consumer, name, url=rabbit.url)
    with kombu.Connection(rabbit.url) as connection:
        channel = connection.channel()
        for publisher, message in zip((direct, fanned), grouped("a-1", "b-1"), strict=True):
            assert publisher.publish([message]) == [None]
            publisher.close()
            rabbitmq.run_consumer(consumer, name, bindings={exchange: "order.#"}, **declared)
            stop.clear()
        assert got == ["a-1", "b-1"]
        channel.queue_delete(name)
        first = rabbitmq.RabbitMQ(name, rabbit.url, 10, {}, f"{name}.dead", 1000, {})
        first.open()
        first.close()
        assert direct.publish(grouped("a-2")) == [None]
        direct.close()
        assert channel.queue_delete(name) == 1
        assert channel.queue_delete(f"{name}.dead") == 0
        channel.exchange_delete(exchange)


def test_declare_what_is_there(rabbit: Server) -> None:
    """A queue and other properties ends the command with a sentence."""
    name = uuid.uuid4().hex
    with kombu.Connection(rabbit.url) as connection:
        channel = connection.channel()
        kombu.Queue(name)(channel).declare()
        with pytest.raises(CommandError, match="and other properties"):
            run(
                "first",
                "--transport=rabbitmq",
                f"--from={name}",
                f"--option=url={rabbit.url}",
                "--declare",
            )
        channel.queue_delete(name)


def test_declare_elsewhere() -> None:
    """Only RabbitMQ's queues are declared, and bindings need that."""
    with pytest.raises(CommandError, match="'kafka' has no option 'declare'"):
        run("first", *KAFKA, SERVERS, "--declare")
    with pytest.raises(ImproperlyConfigured, match="declare=True"):
        rabbitmq.run_consumer(first, "q", url="amqp://localhost", bindings={"shop": "#"})
