"""The tables of times and of states have what the code has."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from idempotency_django.conf import conf
from idempotency_django.contrib.cached import CachedStore
from idempotency_django.contrib.messaging import WebhookReceiver, consumers
from idempotency_django.contrib.messaging.brokers import celery, http, kombu
from idempotency_django.contrib.messaging.models import MessageState
from idempotency_django.contrib.messaging.outbox.topics import Topic
from idempotency_django.contrib.messaging.verifiers import TOLERANCE
from idempotency_django.contrib.timeline import STATES
from idempotency_django.policy import DEFAULTS
from idempotency_django.policy.identity import LONGEST_WAIT
from tests.docs.examples import ROOT

TIMES = (ROOT / "docs" / "reference" / "settings.md").read_text()
PAGE_OF_STATES = (ROOT / "docs" / "operations" / "deploy.md").read_text()
PUBLISHERS = (
    celery.CeleryPublisher,
    http.HttpPublisher,
    kombu.KombuPublisher,
)


def default(function: Callable[..., Any], name: str) -> Any:
    return inspect.signature(function).parameters[name].default


def table(page: str, first: str) -> list[list[str]]:
    """The cells of the table whose first column has this heading."""
    _, _, rest = page.partition(f"\n| {first} |")
    rows = rest.partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def read(text: str) -> timedelta:
    """A duration, as the table has it."""
    number, _, unit = text.partition(" ")
    return timedelta(**{f"{unit.rstrip('s') or 'second'}s": int(number)})


def defaults() -> Iterator[tuple[str, Any]]:
    """The durations of the code, by what the table calls them."""
    yield "`ttl`, policy", DEFAULTS.ttl
    yield "`retention`, policy", DEFAULTS.retention
    yield "`lease`, policy", DEFAULTS.lease
    yield "`max_duration`, policy", DEFAULTS.max_duration
    yield '`on_conflict="wait"`, policy', LONGEST_WAIT
    yield "`RETRY_AFTER`, setting", conf.retry_after
    yield "`ttl`, consumer's policy", consumers.LIFETIME
    yield "`ttl`, receiver", WebhookReceiver.ttl
    yield "`tolerance`, verifier", TOLERANCE
    yield "`RETENTION`, topic", Topic(name="orders", backend="local").retention
    yield "`timeout`, publisher", default(http.HttpPublisher, "timeout")
    yield "`max_age`, `CachedStore`", default(CachedStore, "max_age")


def test_times(settings) -> None:
    """Each word for time has its default; the names are those of the code."""
    settings.IDEMPOTENCY = {}
    assert {
        word: read(value) for word, _, value in table(TIMES, "Word, and where you set it")
    } == dict(defaults())
    assert {default(publisher, "timeout") for publisher in PUBLISHERS} == {timedelta(seconds=10)}


def test_states_of_records() -> None:
    """Each state of a record is there, under the admin's name for it."""
    assert [name for name, _, _ in table(PAGE_OF_STATES, "Record")] == [
        str(name) for name in STATES.values()
    ]


def test_states_of_messages() -> None:
    """Each state of a message is there, under the admin's name for it."""
    assert [name for name, _, _ in table(PAGE_OF_STATES, "Message")] == [
        str(name) for name in MessageState.labels
    ]
