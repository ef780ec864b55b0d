"""The page on brokers has each option of each publisher and transport."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from idempotency_django.contrib.messaging import ConsumerOptions
from idempotency_django.contrib.messaging.brokers import celery, http, kafka, local, rabbitmq, sqs
from tests.docs.examples import ROOT

PAGE = ROOT / "docs" / "messages" / "brokers.md"


def options(heading: str, table: str) -> list[str]:
    """The first column of a section's table."""
    section = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    [text] = [part for part in section if part.startswith(f"{heading}\n")]
    rows = text.partition(f"{table}:\n")[2].strip().partition("\n\n")[0]
    return re.findall(r"^\| `(\w+)` \|", rows, re.MULTILINE)


def keywords(function: Callable[..., Any]) -> list[str]:
    """The arguments that are options."""
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]


@pytest.mark.parametrize(
    ("heading", "table", "function"),
    [
        ("RabbitMQ", "Options of the publisher", rabbitmq.KombuPublisher),
        ("RabbitMQ", "Options of the transport", rabbitmq.run_consumer),
        ("Kafka", "Options of the publisher", kafka.KafkaPublisher),
        ("Kafka", "Options of the transport", kafka.run_consumer),
        ("SQS", "Options of the publisher", sqs.SqsPublisher),
        ("SQS", "Options of the transport", sqs.run_consumer),
        ("Webhooks by HTTP", "Options of the publisher", http.HttpPublisher),
        ("Celery", "Options of the publisher", celery.CeleryPublisher),
        ("Local, without a broker", "Options of the publisher", local.LocalPublisher),
    ],
)
def test_options(heading: str, table: str, function: Callable[..., Any]) -> None:
    """None is missing, and none is made up."""
    assert sorted(options(heading, table)) == sorted(keywords(function))


def test_options_of_all_transports() -> None:
    """The same for what they have in common."""
    documented = options("Run a consumer", "Options of all transports")
    assert documented == [each.name for each in fields(ConsumerOptions)]
