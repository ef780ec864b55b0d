"""Effects elsewhere: once if the transaction is committed, and not at all if it is not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import date
from typing import Any

import pytest
from django.conf import settings
from django.db import transaction
from django.test import override_settings

from idempotency_django.contrib.messaging import Relay, after_commit
from idempotency_django.contrib.messaging.models import OutboxMessage
from idempotency_django.engine.context import current_execution
from tests.support.shared import LONG_AGO

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")

CALLS: list[tuple[Any, ...]] = []
FAILURES: list[Exception] = []


@pytest.fixture(autouse=True)
def _nothing_is_left(using: str) -> Iterator[None]:
    """The outbox and the records are in each of the databases."""
    yield
    CALLS.clear()
    FAILURES.clear()


def ship(*args: Any, **kwargs: Any) -> object:
    """Something that is done elsewhere; its result is nothing that JSON could say."""
    CALLS.append((args, kwargs))
    if FAILURES:
        raise FAILURES.pop()
    return object()


def charge(order: int) -> None:
    """It remembers what it did, and calls others under keys that do not change."""
    execution = current_execution()
    assert execution is not None
    CALLS.append((order, execution.derive_key("charge"), execution.attempt))
    execution.step("first", CALLS.append, ("step",))
    if FAILURES:
        raise FAILURES.pop()


def relay(using: str, rounds: int = 1) -> None:
    """Send what is there, and find everything due."""
    for _ in range(rounds):
        OutboxMessage.objects.using(using).filter(state="pending").update(process_after=LONG_AGO)
        Relay().drain()


def test_committed(using: str) -> None:
    """A function is called with its arguments once the transaction is committed, and not before."""
    with transaction.atomic(using=using):
        after_commit(ship, 17, {"a": [1, None]}, express=True)
    assert CALLS == []
    for _ in range(2):
        Relay().drain()
    assert CALLS == [((17, {"a": [1, None]}), {"express": True})]


def test_rolled_back(using: str) -> None:
    """Nothing is called for a transaction that was rolled back."""
    with transaction.atomic(using=using):
        after_commit(ship, 17)
        transaction.set_rollback(True, using=using)
    Relay().drain()
    assert CALLS == []


def test_sent_twice(using: str) -> None:
    """A relay that dies after the call, and before it notes that, leaves a call that is not made
    again.
    """
    with transaction.atomic(using=using):
        after_commit(ship, 17)
    relay(using)
    OutboxMessage.objects.using(using).update(state="pending", process_after=LONG_AGO)
    Relay().drain()
    assert len(CALLS) == 1
    assert OutboxMessage.objects.using(using).get().state == "done"


def test_resumed(using: str) -> None:
    """A call that failed is repeated: with the same derived keys, and without finished steps."""
    FAILURES.append(ConnectionError("The provider is away."))
    with transaction.atomic(using=using):
        after_commit(charge, 17)
    relay(using, rounds=2)
    first, step, second = CALLS
    assert step == ("step",)
    assert first == (17, second[1], 1)
    assert second[2] == 2
    message = OutboxMessage.objects.using(using).get()
    assert (message.state, message.attempts) == ("done", 1)


@pytest.mark.parametrize("value", [date(2031, 5, 7), {"a": (1,)}, float("nan")])
def test_arguments_that_are_not_json(using: str, value: Any) -> None:
    """An argument that would not come back as it is, is refused before anything is written."""
    with transaction.atomic(using=using):
        with pytest.raises(TypeError, match=r"argument of .*:ship is not JSON"):
            after_commit(ship, 1, value)
        with pytest.raises(TypeError, match=r"argument of .*:ship is not JSON"):
            after_commit(ship, order=value)
    assert not OutboxMessage.objects.using(using).exists()


def rewrite(using: str, **changes: Any) -> None:
    """Do what somebody who can write the table might do."""
    message = OutboxMessage.objects.using(using).get()
    payload = json.loads(message.payload) | changes.pop("payload", {})
    OutboxMessage.objects.using(using).update(payload=json.dumps(payload), **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"type": "os:abort"},
        {"payload": {"args": [18]}},
        {"payload": {"kwargs": {"all": True}}},
        {"payload": {"signature": ""}},
        {"payload": {"args": None}},
    ],
)
def test_forged(using: str, changes: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """Who can write the table can choose neither the function nor its arguments."""
    with transaction.atomic(using=using):
        after_commit(ship, 17)
    rewrite(using, **changes)
    Relay().drain()
    message = OutboxMessage.objects.using(using).get()
    assert message.state == "dead"
    assert "SECRET_KEY" in message.error
    assert CALLS == []


def test_secret_key_replaced(using: str) -> None:
    """A call that waits while SECRET_KEY is replaced is made, if the old key is a fallback."""
    with transaction.atomic(using=using):
        after_commit(ship, 17)
    with override_settings(SECRET_KEY="new", SECRET_KEY_FALLBACKS=[settings.SECRET_KEY]):
        Relay().drain()
    assert len(CALLS) == 1


def test_function_is_gone(using: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that a deployment has removed is no call that is lost: it waits until it is back,
    or until an operator decides.
    """
    with transaction.atomic(using=using):
        after_commit(ship, 17)
    with monkeypatch.context() as deployed:
        deployed.delattr(f"{__name__}.ship")
        relay(using)
        message = OutboxMessage.objects.using(using).get()
        assert (message.state, message.attempts) == ("pending", 1)
        assert f"{__name__}:ship no longer exists" in message.error
    relay(using)
    assert len(CALLS) == 1


async def asynchronous() -> None: ...


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda: None, "another process cannot import it"),
        (asynchronous, "is a coroutine function"),
        (ship.__get__(17), "another process cannot import it"),
    ],
    ids=["lambda", "coroutine function", "method"],
)
def test_functions_that_no_process_could_call(using: str, function: Any, why: str) -> None:
    """They are refused before anything is written."""
    with transaction.atomic(using=using), pytest.raises(TypeError, match=why):
        after_commit(function)
    assert not OutboxMessage.objects.using(using).exists()
