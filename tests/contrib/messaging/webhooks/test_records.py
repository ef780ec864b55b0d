"""A message has a record, whose claim is committed first and completed with what is written."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from django.conf import settings
from django.db import IntegrityError, connections, transaction
from django.test.utils import override_settings

from idempotency_django.contrib.messaging import Event, process_due, publish
from idempotency_django.contrib.messaging.inbox import (
    IN_PROGRESS,
    claim,
    execution_of,
    process,
)
from idempotency_django.contrib.messaging.models import InboxMessage, OutboxMessage
from idempotency_django.models import IdempotencyKey
from idempotency_django.policy import Policy
from idempotency_django.stores import stores
from tests.contrib.messaging.settling import settle
from tests.models import Effect
from tests.support.shared import LONG_AGO

from .conftest import Inbox
from .receivers import Hook, Stepping, behaviour, deliver

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")


def records(inbox: Inbox) -> int:
    return IdempotencyKey.objects.using(inbox.alias).count()


def die_in_the_handler(inbox: Inbox) -> None:
    """What a process leaves that is killed in its handler, once its leases are over."""
    [message] = claim(1)
    plan = execution_of(message).plan
    plan.store.acquire(replace(plan.operation, lease=plan.policy.lease))
    inbox.due_now()
    IdempotencyKey.objects.using(inbox.alias).update(lease_expires_at=LONG_AGO)


def test_publish(inbox: Inbox) -> None:
    """What the handler publishes is committed with its record, which it names as its cause."""
    topics = {"orders": {"BACKEND": "tests.contrib.messaging.outbox.conftest.Broker"}}
    behaviour["shop"] = lambda event, execution: publish("orders", 1, type="paid")
    with override_settings(IDEMPOTENCY={**settings.IDEMPOTENCY, "OUTBOX": topics}):
        deliver(Hook)
        assert process_due() == {"done": 1}
    assert OutboxMessage.objects.using(inbox.alias).get().caused_by == "m-1 webhook:shop"


def test_integrity_error_that_is_caught(inbox: Inbox) -> None:
    """A handler may have transactions of its own, and catch what they raise."""

    def handle(event: Event, execution: Any) -> None:
        using = execution._store.using
        with pytest.raises(IntegrityError), transaction.atomic(using=using):
            InboxMessage.objects.using(using).create(
                source="shop", message_id="m-1", body=b"", received_at="2030-01-01T00:00:00Z"
            )
        with transaction.atomic(using=using):
            Effect.objects.using(using).create(reference="inner")

    behaviour["shop"] = handle
    deliver(Hook)
    assert process_due() == {"done": 1}
    assert inbox.effects() == ["shop m-1", "inner"]


def test_marked_for_rollback(inbox: Inbox) -> None:
    """A handler that marks its transaction for rollback, and succeeds, has failed."""

    def handle(event: Event, execution: Any) -> None:
        transaction.set_rollback(True, using=execution._store.using)

    behaviour["shop"] = handle
    deliver(Hook)
    assert process_due() == {"pending": 1}
    assert inbox.effects() == []


def test_hook_that_fails(inbox: Inbox) -> None:
    """An error after the commit repeats no effect: the next attempt finds the message handled."""

    def hook() -> None:
        raise ConnectionError

    def handle(event: Event, execution: Any) -> None:
        transaction.on_commit(hook, using=inbox.alias)

    behaviour["shop"] = handle
    deliver(Hook)
    assert process_due() == {"pending": 1}
    inbox.due_now()
    assert process_due() == {"done": 1}
    assert inbox.effects() == ["shop m-1"]


def test_killed_before_it_is_noted(inbox: Inbox) -> None:
    """What was committed is not done again, although the row does not say that it was handled."""
    deliver(Hook)
    [message] = claim(1)
    execution_of(message).run(claim_first=True)  # and dies
    assert inbox.states() == ["pending"]
    inbox.due_now()
    assert process_due() == {"done": 1}
    assert inbox.effects() == ["shop m-1"]


def test_late_owner(inbox: Inbox) -> None:
    """A process whose claim another one has taken over does not call the handler any more."""
    deliver(Hook)
    [late] = claim(1)
    inbox.due_now()
    [successor] = claim(1)
    assert process(successor) == "done"
    assert process(late) == "done"
    assert inbox.effects() == ["shop m-1"]
    assert (inbox.row().attempts, inbox.row().state) == (2, "done")


def test_long_handler(inbox: Inbox) -> None:
    """While a handler runs, no process takes over, however long ago its claim has ended."""
    if connections[inbox.alias].vendor == "sqlite":
        pytest.skip("SQLite has one writer")
    deliver(Hook)
    inside, go_on = threading.Event(), threading.Event()

    def slow(event: Event, execution: Any) -> None:
        inside.set()
        assert go_on.wait(30)

    behaviour["shop"] = slow
    tallies: list[Any] = []

    def work() -> None:
        [message] = claim(1)
        inbox.due_now()  # its claim is over
        tallies.append(process(message))
        connections.close_all()

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(30)
    assert process_due() == {"pending": 1}
    assert inbox.row().error == IN_PROGRESS
    go_on.set()
    thread.join()
    assert tallies == ["done"]
    inbox.due_now()
    assert process_due() in ({"done": 1}, {})
    assert inbox.effects() == ["shop m-1"]
    assert inbox.states() == ["done"]


def test_interrupted(inbox: Inbox) -> None:
    """Attempts whose processes died count; the handler is told, until there are no more."""
    told = []
    behaviour["shop"] = lambda event, execution: told.append(
        (execution.attempt, execution.interrupted)
    )
    deliver(Hook)
    die_in_the_handler(inbox)
    assert process_due() == {"done": 1}
    assert told == [(2, True)]
    settle(inbox.row(), "repeat", by="ann")
    assert process_due() == {"done": 1}
    assert told[1:] == [(3, False)]


def test_interrupted_too_often(inbox: Inbox) -> None:
    """What kills each process is dead after max_attempts, without being begun again."""
    deliver(Hook)
    for _ in range(2):
        die_in_the_handler(inbox)
    assert process_due() == {"dead": 1}
    assert inbox.effects() == []
    assert inbox.row().error
    settle(inbox.row(), "retry", by="ann")
    assert process_due() == {"done": 1}


def test_killed_with_another(inbox: Inbox) -> None:
    """A process that dies costs the messages that it had claimed, and not begun, no attempt."""
    for number in (1, 2):
        deliver(Hook, f"m-{number}")
    for _ in range(3):
        assert len(claim(10)) == 2  # by a process that dies in neither
        inbox.due_now()
    assert process_due() == {"done": 2}
    assert inbox.effects() == ["shop m-1", "shop m-2"]


def derived(inbox: Inbox, **settings: Any) -> str:
    """The key that an attempt derives, which then fails."""
    keys: list[str] = []

    def handle(event: Event, execution: Any) -> None:
        keys.append(execution.derive_key("charge"))
        raise ConnectionError

    behaviour["shop"] = handle
    inbox.due_now()
    with override_settings(**settings):
        process_due()
    return keys[0]


def test_derived_keys(inbox: Inbox) -> None:
    """Attempts derive one key, also after a rotation of SECRET_KEY; nobody else can make it."""
    deliver(Hook)
    first = derived(inbox)
    rotated = {"SECRET_KEY": "another", "SECRET_KEY_FALLBACKS": [settings.SECRET_KEY]}
    assert derived(inbox, **rotated) == first
    with override_settings(SECRET_KEY="a stranger's"):
        deliver(Hook, "m-1")  # a duplicate changes nothing
    deliver(Hook, "m-2")
    assert derived(inbox) != first


def test_derived_keys_of_a_record(inbox: Inbox) -> None:
    """A handler that gets steps, or the leased mode, derives the keys that it derived before."""
    deliver(Hook)
    first = derived(inbox)
    with patch.object(Hook.consumer, "_policy", Policy(mode="leased", ttl=Hook.ttl)):
        assert derived(inbox) == first
    assert records(inbox) == 1


def test_leased(inbox: Inbox) -> None:
    """In the leased mode there is a record, which keeps the steps."""
    deliver(Stepping)
    assert process_due() == {"done": 1}
    assert records(inbox) == 1


def test_two_databases(inbox: Inbox) -> None:
    """Where the handlers write to another database, a record there commits with them."""
    others = [alias for alias in connections if alias != inbox.alias]
    if not others:
        pytest.skip("two databases are needed")
    elsewhere = {
        "BACKEND": "idempotency_django.stores.database.DatabaseStore",
        "OPTIONS": {"using": others[0]},
    }
    given = {**settings.IDEMPOTENCY, "STORES": {"default": elsewhere}}
    with override_settings(IDEMPOTENCY=given):
        deliver(Hook)
        assert process_due() == {"done": 1}
        assert stores["default"].using == others[0]
    assert IdempotencyKey.objects.using(others[0]).count() == 1
    assert Effect.objects.using(others[0]).count() == 1
