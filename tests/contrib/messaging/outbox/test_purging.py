"""Purging the outbox, by the command and the task of the stores."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from io import StringIO

import pytest
from django.core.management import call_command
from django.db import connections, transaction
from django.db.models import QuerySet

from idempotency_django.contrib.messaging import Relay, publish
from idempotency_django.contrib.messaging.models import OutboxMessage, OutboxStream
from idempotency_django.contrib.messaging.outbox import publishing
from idempotency_django.contrib.messaging.tasks import relay_outbox
from idempotency_django.tasks import purge_expired_keys
from idempotency_django.testing import eventually, in_threads

from .conftest import Broker, outbox
from .test_relay import got, publish_each, refuse, states

pytestmark = [
    pytest.mark.django_db(transaction=True, databases="__all__"),
    pytest.mark.usefixtures("settled"),
    pytest.mark.driver,
]


@pytest.fixture
def settled(using: str, broker: object) -> Iterator[None]:
    """Nothing is kept after it was sent, on each of the databases."""
    with outbox(orders={"RETENTION": timedelta(0)}):
        yield


def command(name: str, *arguments: str) -> str:
    """What a command says."""
    said = StringIO()
    call_command(name, *arguments, stdout=said)
    return said.getvalue()


def test_command(using: str) -> None:
    """What was sent goes, in batches; what waits, and the numbers of its group, stays."""
    publish_each(range(5), using, group="a")
    publish_each([7, 8], using, group="b")
    refuse(8)
    Relay().drain()
    assert "Purged 7 " in command("purge_idempotency_keys", "--batch-size", "2")  # and a group
    assert states(using) == {8: "pending"}
    assert list(OutboxStream.objects.using(using).values_list("stream", flat=True)) == ["orders/b"]


def test_task(using: str) -> None:
    """The task purges the outbox as well."""
    publish_each([1], using)
    Relay().drain()
    assert purge_expired_keys() == 1
    assert states(using) == {}


def test_group_whose_dead_letter_is_gone(using: str) -> None:
    """A group whose dead letter was deleted by hand goes on in the next run; others wait."""
    for group in ("a", "b"):
        publish_each([1, 2], using, group=group)
    with outbox(orders={"MAX_ATTEMPTS": 1}):
        refuse(1)
        Relay().drain()
    assert got() == []
    OutboxMessage.objects.using(using).filter(group="a", state="dead").delete()
    Relay().drain()
    assert [(message.subject, message.data) for message in Broker.got] == [("a", 2)]


def test_numbers_amid_publishing(using: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of a group stay if somebody publishes to it while a purge looks at them."""
    if connections[using].vendor != "postgresql":
        pytest.skip("only PostgreSQL says who waits")
    monkeypatch.setattr(
        publishing, "unlocked", QuerySet.select_for_update
    )  # so that it looks, and waits
    OutboxStream.objects.using(using).create(stream="orders/g", last_sequence=5)
    written, purged = threading.Event(), []

    def write() -> None:
        with transaction.atomic(using=using):
            publish("orders", 6, type="n", group="g")
            written.set()
            eventually(lambda: waiting(using) == 1)

    def purge() -> None:
        assert written.wait(30)
        purged.append(publishing.purge_streams(timedelta(0), 100))

    in_threads([write, purge])
    assert purged == [0]
    publish_each([7], using, group="g")
    numbers = OutboxMessage.objects.using(using).order_by("pk").values_list("sequence", flat=True)
    assert list(numbers) == [6, 7]


def waiting(using: str) -> int:
    """How many statements wait for a lock."""
    with connections[using].cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_locks WHERE NOT granted")
        return int(cursor.fetchone()[0])


def test_relay_task(using: str) -> None:
    """The Celery task sends what is due."""
    publish_each([1, 2], using)
    assert relay_outbox() == 2
    assert got() == [1, 2]
