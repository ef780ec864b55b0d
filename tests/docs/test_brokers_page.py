"""The page on brokers has each option of each publisher."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

from idempotency_django.contrib.messaging.brokers import celery, http, kafka, kombu, local
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
        ("RabbitMQ, Redis and SQS", "Options of the publisher", kombu.KombuPublisher),
        ("Kafka", "Options of the publisher", kafka.KafkaPublisher),
        ("Webhooks by HTTP", "Options of the publisher", http.HttpPublisher),
        ("Celery", "Options of the publisher", celery.CeleryPublisher),
        ("Local, without a broker", "Options of the publisher", local.LocalPublisher),
    ],
)
def test_options(heading: str, table: str, function: Callable[..., Any]) -> None:
    """None is missing, and none is made up."""
    assert sorted(options(heading, table)) == sorted(keywords(function))
