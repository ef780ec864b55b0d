"""Purging the outbox, by the command and the task of the stores."""

from __future__ import annotations

from datetime import timedelta
from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.db import transaction
from django.test import override_settings

from idempotency_django.messaging.models import OutboxLease, OutboxMessage, OutboxStream
from idempotency_django.messaging.outbox import publish
from idempotency_django.messaging.outbox.purging import purge_streams
from idempotency_django.messaging.outbox.relay import Relay
from idempotency_django.models import DatabaseNow
from idempotency_django.tasks import purge_expired_keys
from idempotency_django.testing import in_threads

from .test_relay import got, publish_each, refuse, states

pytestmark = [
    pytest.mark.django_db(transaction=True, databases="__all__"),
    pytest.mark.usefixtures("settled"),
]


@pytest.fixture
def settled(using: str, broker: object) -> object:
    """Nothing is kept after it was sent, on each of the databases."""
    orders = {"BACKEND": "tests.outbox.conftest.Broker", "RETENTION": timedelta(0)}
    idempotency = {"OUTBOX": {"orders": orders}, "MESSAGING_DATABASE": using}
    with override_settings(IDEMPOTENCY=idempotency):
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
    said = command("purge_idempotency_keys", "--dry-run")
    assert said.startswith("Would purge 0 idempotency keys, 6 outbox messages. ")
    assert "6 outbox messages" in command("purge_idempotency_keys", "--batch-size", "2")
    assert states(using) == {8: "pending"}
    assert list(OutboxStream.objects.using(using).values_list("stream", flat=True)) == ["orders/b"]
    assert "messages" not in command("purge_idempotency_keys", "--store", "default")


def test_task(using: str) -> None:
    """The task purges the outbox as well."""
    publish_each([1], using)
    Relay().drain()
    assert purge_expired_keys() == 1
    assert states(using) == {}


def test_window_keeps(using: str) -> None:
    """A message is kept while its window may still refuse another."""
    publish_each([1], using, dedup_id="d")
    Relay().drain()
    assert purge_expired_keys() == 0
    publish_each([2], using, dedup_id="d")
    assert states(using) == {1: "sent"}
    OutboxMessage.objects.using(using).update(dedup_until=DatabaseNow())
    assert purge_expired_keys() == 1


def test_leases_of_the_dead(using: str) -> None:
    """The lease of a relay that died goes when it is over; that of an operator's stays."""
    leases = OutboxLease.objects.using(using)
    leases.create(stream="orders/dead", token="x", expires_at=DatabaseNow())
    leases.create(stream="orders/blocked", expires_at=None)
    purge_expired_keys()
    assert list(leases.values_list("stream", flat=True)) == ["orders/blocked"]


def test_numbers_amid_publishing(using: str) -> None:
    """No number is deleted while somebody publishes to the group: none is given twice."""

    def write() -> None:
        for number in range(30):
            with transaction.atomic(using=using):
                publish("orders", number, type="n", group="g", using=using)

    def purge() -> None:
        for _ in range(60):
            purge_streams(timedelta(0), 100)

    in_threads([write, purge])
    numbers = OutboxMessage.objects.using(using).order_by("sequence")
    assert list(numbers.values_list("sequence", flat=True)) == list(range(1, 31))


def test_relay_command(using: str) -> None:
    """``--once`` sends what is due and says how much."""
    publish_each([1, 2], using)
    assert command("relay_outbox", "--once", "--topic", "orders") == "Sent 2 messages.\n"
    assert got() == [1, 2]
    assert command("relay_outbox", "--once") == "Nothing was due.\n"
    with pytest.raises(CommandError, match="Did you mean 'orders'"):
        command("relay_outbox", "--once", "--topic", "order")
    for option in ("--batch", "--lease", "--poll"):
        with pytest.raises(CommandError, match="must be a number above 0"):
            command("relay_outbox", option, "0")
