"""Topics and what ``manage.py check`` says of them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.core.checks import CheckMessage
from django.test import override_settings

from idempotency_django.contrib.messaging.outbox.topics import check_outbox

LOCAL = "idempotency_django.contrib.messaging.LocalPublisher"
BROKER = "tests.contrib.messaging.outbox.conftest.Broker"
ENTRY = {"BACKEND": BROKER}
CONSUMER = "tests.contrib.messaging.outbox.crashing.booking"


def messages(**idempotency: Any) -> list[CheckMessage]:
    with override_settings(IDEMPOTENCY=idempotency):
        return [*check_outbox()]


def ids(**idempotency: Any) -> list[str]:
    """The ids of what the checks find."""
    found = messages(**idempotency)
    return [str(message.id).removeprefix("idempotency_django.") for message in found]


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"BACKEND": BROKER, "RETENTION": timedelta(days=1)}, ""),
        ({"BACKEND": "nowhere.Publisher"}, "cannot be created: No module named 'nowhere'"),
        ({"BACKEND": LOCAL, "OPTIONS": {"consumers": []}}, "it has no consumers. List paths"),
        (
            {"BACKEND": LOCAL, "OPTIONS": {"consumers": [CONSUMER], "consumer": 1}},
            "unexpected keyword argument 'consumer'",
        ),
        (
            {"BACKEND": LOCAL, "OPTIONS": {"consumers": ["shop.nobody"]}},
            "There is no consumer at 'shop.nobody'",
        ),
        ({"BACKEND": LOCAL, "OPTIONS": {"consumers": [CONSUMER]}}, ""),
        (BROKER, "It is a dict with BACKEND"),
        ({"BACKEND": BROKER, "BACKENDS": 1}, "unexpected keyword argument 'backends'"),
        ({"BACKEND": BROKER, "MAX_ATTEMPTS": 0}, "'MAX_ATTEMPTS' must be 1 or more"),
        ({"BACKEND": BROKER, "RETENTION": 7}, "'RETENTION' must be a timedelta"),
        (
            {
                "BACKEND": "http",
                "OPTIONS": {
                    "url": "https://a.example/",
                    "secrets": ["whsec_c2VjcmV0"],
                    "timeout": 30,
                },
            },
            "timeout",
        ),
    ],
)
def test_topics(entry: Any, said: str) -> None:
    """What is wrong with a topic is said before the first message is written to it."""
    found = messages(OUTBOX={"orders": entry})
    assert [message.id for message in found] == ["idempotency_django.E043"] * bool(said)
    assert all(said in message.msg for message in found)
    [message] = messages(OUTBOX={"or/ders": ENTRY})
    assert "'or/ders' must be up to 100 letters" in message.msg


def test_databases(settings: Any) -> None:
    """The tables need a database that is the records'."""
    outbox = {"OUTBOX": {"orders": ENTRY}}
    assert ids(**outbox, MESSAGING_DATABASE="replica") == ["W007"]
    assert ids(OUTBOX=17) == []  # check_settings reports it
    memory = {"default": {"BACKEND": "idempotency_django.stores.memory.MemoryStore"}}
    assert ids(**outbox, STORES=memory) == []


def test_two_databases(settings: Any) -> None:
    """Where records and messages cannot commit together, the check says so."""
    aliases = list(settings.DATABASES)
    if len(aliases) < 2:
        pytest.skip("two databases are needed")
    assert ids(OUTBOX={"orders": ENTRY}, MESSAGING_DATABASE=aliases[1]) == ["W007"]
    assert ids(MESSAGING_DATABASE=aliases[1]) == []
