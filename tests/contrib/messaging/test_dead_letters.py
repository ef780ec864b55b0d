"""Dead letters of consumers: what is kept of an event, and what an operator does to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.test import override_settings

from idempotency_django.contrib.messaging import (
    Consumer,
    Duplicate,
    Event,
    dead_letters,
    process_due,
)
from idempotency_django.contrib.messaging.errors import DeadLettered, UnknownEventType
from idempotency_django.contrib.messaging.models import InboxMessage
from idempotency_django.errors import FingerprintMismatch
from idempotency_django.models import IdempotencyKey
from tests.contrib.messaging.outbox.conftest import changed_settings
from tests.contrib.messaging.settling import NotSettled, settle
from tests.models import Effect
from tests.support.shared import LONG_AGO, effect_counts

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")

billing = Consumer("billing", max_attempts=1)
EVENT = Event(id="e-1", source="/shop", type="order.paid", data={"n": 1})
BODY = EVENT.to_json().encode()
fails: list[bool] = []


@billing.on("order.paid")
def book(event: Event, execution: Any) -> None:
    """Make an effect, and fail if it has to."""
    Effect.objects.using(execution._store.using).create(reference=event.id)
    if fails:
        raise ConnectionError("The warehouse does not respond.")


@pytest.fixture(autouse=True)
def listed(using: str) -> Iterator[None]:
    """The consumer is in the settings, and fails."""
    fails[:] = [True]
    with changed_settings(CONSUMERS=[f"{__name__}.billing"]), override_settings(ROOT_URLCONF=None):
        yield


def rows(using: str) -> Any:
    return InboxMessage.objects.using(using)


def test_retried(using: str) -> None:
    """An event that a consumer has dead-lettered is retried by that consumer."""
    with pytest.raises(DeadLettered) as dead:
        billing.handle(EVENT)
    dead_letters.keep(billing, BODY, dead.value)
    assert process_due() == {}
    settle(rows(using).get(), "retry", by="ann")
    assert process_due() == {"dead": 1}
    fails.clear()
    settle(rows(using).get(), "retry", by="ann")
    assert process_due() == {"done": 1}
    assert effect_counts(using) == {"e-1": 1}
    rows(using).update(source="consumer:gone", state="dead")
    with pytest.raises(NotSettled, match="'gone'"):
        settle(rows(using).get(), "retry", by="ann")


def test_discarded(using: str) -> None:
    """A delivery after that is a duplicate, however late, until an operator reprocesses it."""
    with pytest.raises(DeadLettered) as dead:
        billing.handle(EVENT)
    dead_letters.keep(billing, BODY, dead.value)
    records = IdempotencyKey.objects.using(using)
    records.update(expires_at=LONG_AGO, purge_at=LONG_AGO)  # it is held for as long as it takes
    settle(rows(using).get(), "discard", by="ann")
    fails.clear()
    assert billing.handle(EVENT) == Duplicate(None)
    assert (records.get().error, effect_counts(using)) == ("Discarded by ann.", {})
    settle(rows(using).get(), "repeat", by="ann")
    assert process_due() == {"done": 1}
    assert effect_counts(using) == {"e-1": 1}


def test_retried_after_half_a_discard(using: str) -> None:
    """Records in a database of their own are settled first. What ends the process then leaves a
    dead letter, whose retry has its effect.
    """
    with pytest.raises(DeadLettered) as dead:
        billing.handle(EVENT)
    dead_letters.keep(billing, BODY, dead.value)
    dead_letters.close(billing.execution_of(EVENT).plan, "ann")
    fails.clear()
    settle(rows(using).get(), "retry", by="ann")
    assert process_due() == {"done": 1}
    assert effect_counts(using) == {"e-1": 1}


def test_discarded_when_its_consumer_is_gone(using: str) -> None:
    """Its record stays held: nothing knows any more that it belongs to the message."""
    with pytest.raises(DeadLettered) as dead:
        billing.handle(EVENT)
    dead_letters.keep(billing, BODY, dead.value)
    with changed_settings(CONSUMERS=[]):
        settle(rows(using).get(), "discard", by="ann")
    assert rows(using).get().state == "discarded"
    assert IdempotencyKey.objects.using(using).held().exists()
    fails.clear()
    settle(rows(using).get(), "repeat", by="ann")
    assert process_due() == {"done": 1}
    assert effect_counts(using) == {"e-1": 1}


def test_delivered_again(using: str) -> None:
    """The row keeps the error of the attempt: the delivery after it only knows that it is dead. If
    an operator has discarded it meanwhile, that stays so, as nothing was tried.
    """
    first, again = DeadLettered("The last attempt failed."), DeadLettered("An attempt before did.")
    first.__cause__ = ValueError("The account is closed.")
    for error in (first, again):
        dead_letters.keep(billing, BODY, error)
        assert "The account is closed." in rows(using).get().error
    for state in ("done", "discarded"):
        rows(using).update(state=state, error="")
        dead_letters.keep(billing, BODY, again)
        kept = state == "discarded"
        assert rows(using).get().state == ("discarded" if kept else "dead")
        assert ("An attempt before did." in rows(using).get().error) is not kept


@pytest.mark.parametrize(("before", "after"), [("done", "dead"), ("pending", "pending")])
def test_dead_again(using: str, before: str, after: str) -> None:
    """One that was handled is dead again; one that an operator has sent on its way is not."""
    dead_letters.keep(billing, BODY, ValueError("first"))
    rows(using).update(state=before)
    dead_letters.keep(billing, BODY, ValueError("second"))
    row = rows(using).get()
    assert row.state == after
    assert row.error == ("ValueError: second" if after == "dead" else "ValueError: first")


def test_another_event_under_its_id(using: str) -> None:
    """What has the id of another event is kept beside what was dead-lettered under that id."""
    other = Event(id="e-1", source="/shop", type="order.paid", data={"n": 2})
    for _ in range(2):
        dead_letters.keep(billing, BODY, ValueError())
        dead_letters.keep(billing, other.to_json().encode(), FingerprintMismatch())
    bodies = sorted(bytes(row.body).decode() for row in rows(using))
    assert bodies == [EVENT.to_json(), other.to_json()]


def test_no_event(using: str) -> None:
    """Retrying what is no event does nothing, and says why."""
    dead_letters.keep(billing, b"\xff", ValueError("It is not an event."), place="orders/0/17")
    with pytest.raises(NotSettled, match="not JSON"):
        settle(rows(using).get(), "retry", by="ann")
    assert rows(using).get().state == "dead"


def test_no_handler(using: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An event of a type without a handler can be retried as soon as it has one."""
    lost = Event(id="e-1", source="/shop", type="order.lost", data={"n": 1})
    fails.clear()
    dead_letters.keep(
        billing, lost.to_json().encode(), UnknownEventType("There is no handler for it.")
    )
    with pytest.raises(NotSettled, match="no handler for events of the type"):
        settle(rows(using).get(), "retry", by="ann")
    monkeypatch.setitem(billing._handlers, "order.lost", billing._handlers["order.paid"])
    settle(rows(using).get(), "retry", by="ann")
    assert process_due() == {"done": 1}
