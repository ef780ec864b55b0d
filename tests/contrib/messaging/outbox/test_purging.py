"""Purging the outbox, by the command and the task of the stores."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from io import StringIO

import pytest
from django.core.management import call_command
from django.db import connections, transaction
from django.db.models import QuerySet

from idempotency_django.contrib.messaging import Relay, publish
from idempotency_django.contrib.messaging.models import OutboxMessage, OutboxStream
from idempotency_django.contrib.messaging.outbox import relay as relay_module
from idempotency_django.contrib.messaging.outbox.relay import OUTBOX
from idempotency_django.models import DatabaseNow
from idempotency_django.tasks import purge_expired_keys
from idempotency_django.testing import eventually, in_threads
from tests.support.shared import LONG_AGO

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
    assert "Purged 6 " in command("purge_idempotency_keys", "--batch-size", "2")
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


def purge(limit: int = 100) -> int:
    """Purge one batch."""
    return OUTBOX.purge(timedelta(0), limit)


def test_numbers_of_a_group_with_messages(using: str) -> None:
    """The numbers of a group stay while one of its messages is kept, whichever that is."""
    publish_each([1, 2, 3], using, group="g")
    Relay().drain()
    rows = OutboxMessage.objects.using(using)
    rows.filter(sequence=1).update(purge_at=DatabaseNow() + timedelta(days=1))
    assert purge() == 2
    publish_each([4], using, group="g")
    assert list(rows.order_by("pk").values_list("sequence", flat=True)) == [1, 4]
    rows.update(state="done", process_after=None, purge_at=LONG_AGO)
    assert purge() == 2
    assert not OutboxStream.objects.using(using).exists()


def test_numbers_when_the_last_message_goes_first(using: str) -> None:
    """The numbers of a group go with the message that is purged last, whichever that is."""
    publish_each([1, 2], using, group="g")
    Relay().drain()
    rows = OutboxMessage.objects.using(using)
    rows.filter(sequence=1).update(purge_at=DatabaseNow() + timedelta(days=1))
    assert purge() == 1
    rows.update(purge_at=LONG_AGO)
    assert purge() == 1
    assert not OutboxStream.objects.using(using).exists()


def test_numbers_amid_publishing(using: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of a group stay if somebody publishes to it while a purge looks at them."""
    if connections[using].vendor != "postgresql":
        pytest.skip("only PostgreSQL says who waits")
    # It looks, and waits.
    monkeypatch.setattr(relay_module, "unlocked", QuerySet.select_for_update)
    publish_each([1, 2], using, group="g")
    Relay().drain()
    written, purged = threading.Event(), []

    def write() -> None:
        with transaction.atomic(using=using):
            publish("orders", 3, type="n", group="g")
            written.set()
            eventually(lambda: waiting(using) == 1)

    def purge_meanwhile() -> None:
        assert written.wait(30)
        purged.append(purge())

    in_threads([write, purge_meanwhile])
    assert purged == [2]
    publish_each([4], using, group="g")
    numbers = OutboxMessage.objects.using(using).order_by("pk").values_list("sequence", flat=True)
    assert list(numbers) == [3, 4]


def test_numbers_never_go_back(using: str) -> None:
    """However publishers, relays and purges interleave, a group's numbers rise while it has any."""
    rows = OutboxMessage.objects.using(using)
    writers = [1, 2]

    def write() -> None:
        try:
            for number in range(100):
                group = f"g{number % 2}"
                with transaction.atomic(using=using):
                    publish("orders", number, type="n", group=group)
                    kept = rows.filter(group=group).order_by("pk")
                    numbers = [*kept.values_list("sequence", flat=True)]
                assert numbers == sorted({*numbers})
        finally:
            writers.pop()

    def repeat(work: Callable[[], object]) -> None:
        while writers:
            work()

    send = Relay(batch_size=5).send_batch
    in_threads([write, write, partial(repeat, send), partial(repeat, partial(purge, 3))])
    Relay().drain()
    assert sorted(got()) == sorted([*range(100)] * 2)


def waiting(using: str) -> int:
    """How many statements wait for a lock."""
    with connections[using].cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_locks WHERE NOT granted")
        return int(cursor.fetchone()[0])
