"""A message has a record, whose claim is committed first and completed with what is written."""

from __future__ import annotations

from dataclasses import replace

import pytest
from django.conf import settings
from django.db import connections
from django.test.utils import override_settings

from idempotency_django.contrib.messaging import process_due
from idempotency_django.contrib.messaging.inbox import (
    claim,
    execution_of,
)
from idempotency_django.models import IdempotencyKey
from idempotency_django.stores import stores
from tests.contrib.messaging.settling import settle
from tests.models import Effect
from tests.support.shared import LONG_AGO

from .conftest import Inbox
from .receivers import Hook, behaviour, deliver

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")


def die_in_the_handler(inbox: Inbox) -> None:
    """What a process leaves that is killed in its handler, once its leases are over."""
    [message] = claim(1)
    plan = execution_of(message).plan
    plan.store.acquire(replace(plan.operation, lease=plan.policy.lease))
    inbox.due_now()
    IdempotencyKey.objects.using(inbox.alias).update(lease_expires_at=LONG_AGO)


def test_killed_before_it_is_noted(inbox: Inbox) -> None:
    """What was committed is not done again, although the row does not say that it was handled."""
    deliver(Hook)
    [message] = claim(1)
    execution_of(message).run(claim_first=True)  # and dies
    assert inbox.states() == ["pending"]
    inbox.due_now()
    assert process_due() == {"done": 1}
    assert inbox.effects() == ["shop m-1"]


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
