"""Processing: each message that was received is handled once, in its order, or dead-lettered."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.db import connections
from django.utils import timezone

from idempotency_django.contrib.messaging import Event, loops
from idempotency_django.contrib.messaging import inbox as processing
from idempotency_django.contrib.messaging.inbox import (
    INBOX,
    claim,
    execution_of,
    mark,
    process,
    process_due,
)
from idempotency_django.contrib.messaging.loops import Part, run
from idempotency_django.models import DatabaseNow, IdempotencyKey
from idempotency_django.stores import stores
from idempotency_django.testing import eventually, in_threads
from tests.contrib.messaging.conftest import STORE
from tests.contrib.messaging.outbox.conftest import changed_settings
from tests.contrib.messaging.settling import NotSettled, settle
from tests.models import Effect
from tests.support.shared import LONG_AGO

from .conftest import Inbox
from .receivers import (
    DAY,
    Hook,
    Passing,
    Stepping,
    behaviour,
    body_of,
    deliver,
    effect,
)

pytestmark = [pytest.mark.django_db(transaction=True, databases="__all__"), pytest.mark.driver]


def fail(event: Event, execution: Any) -> Any:
    """What a handler does that fails after its effect."""
    raise ConnectionError("The warehouse does not respond.")


def test_handled(inbox: Inbox) -> None:
    """A message is handled once."""
    deliver(Hook, body=body_of(n=7))
    assert process_due() == {"done": 1}
    row = inbox.row()
    assert (row.state, row.attempts, row.process_after, row.error) == ("done", 1, None, "")
    assert row.purge_at - row.processed_at == timedelta(days=7)
    record = IdempotencyKey.objects.using(inbox.alias).get()
    assert (record.scope, record.caused_by) == ("webhook:shop", "m-1 inbox:shop")
    assert inbox.effects() == ["shop m-1"]
    assert deliver(Hook, body=body_of(n=7)).status_code == 200
    assert process_due() == {}
    assert inbox.effects() == ["shop m-1"]


def test_event(inbox: Inbox) -> None:
    """The handler gets the whole body, under the id, source and type of the message."""
    events = []
    behaviour["shop"] = lambda event, execution: events.append(event)
    deliver(Hook, "an id with spaces", body_of(n=7))
    process_due()
    data = {"type": "order.paid", "n": 7}
    [event] = events
    assert event.caused_by == f"{inbox.rows().get().message_id} inbox:shop"
    given = Event(id="an id with spaces", source="shop", type="order.paid", data=data)
    assert replace(event, extensions={}) == given


def test_no_handler(inbox: Inbox, caplog: pytest.LogCaptureFixture) -> None:
    """A message that nobody handles is ignored, and can be reprocessed when somebody does."""
    processing._warn_of_unhandled.cache_clear()
    deliver(Hook, body=body_of("order.lost"))
    deliver(Hook, "m-2", body=body_of("order.lost"))
    assert process_due() == {"discarded": 2}
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len([text for text in said if "'order.lost' are discarded" in text]) == 1
    Hook.on("order.lost")(effect)
    try:
        settle(inbox.row(), "repeat", by="ann")
        assert process_due() == {"done": 1}
    finally:
        Hook.consumer._handlers.pop("order.lost")
    assert inbox.effects() == ["shop m-1"]


def test_fails(inbox: Inbox) -> None:
    """A failure undoes what the handler wrote; a later attempt follows, later after each."""
    behaviour["shop"] = fail
    deliver(Hook)
    assert process_due() == {"pending": 1}
    row = inbox.row()
    assert (row.attempts, row.error) == (1, "ConnectionError: The warehouse does not respond.")
    now = inbox.rows().values_list(DatabaseNow(), flat=True).get()
    wait = (row.process_after - now).total_seconds()
    assert 0 < wait <= processing.BACKOFF.first.total_seconds()
    assert process_due() == {}
    behaviour.clear()
    inbox.due_now()
    assert process_due() == {"done": 1}
    assert (inbox.row().attempts, inbox.row().error) == (2, "")
    assert inbox.effects() == ["shop m-1"]


def dead_letter(inbox: Inbox, receiver: Any = Hook) -> None:
    """Have a message fail as often as it may."""
    behaviour[receiver.source] = fail
    deliver(receiver)
    for state in ("pending", "dead"):
        inbox.due_now()
        assert process_due() == {state: 1}
    behaviour.clear()


def test_dead(inbox: Inbox) -> None:
    """After max_attempts failures a message is dead-lettered, and a retry is one more attempt."""
    dead_letter(inbox)
    row = inbox.row()
    assert (row.state, row.process_after, row.purge_at) == ("dead", None, None)
    assert row.error == "ConnectionError: The warehouse does not respond."
    assert process_due() == {}
    settle(row, "retry", by="ann")
    assert process_due() == {"done": 1}
    assert inbox.row().attempts == 3
    assert inbox.effects() == ["shop m-1"]


@pytest.mark.parametrize("actions", [["retry"], ["discard", "repeat"]])
def test_retry_resumes(inbox: Inbox, actions: list[str]) -> None:
    """A retry does not do again what a step has done, and derives the same keys. Nor does what
    brings back a message that was discarded.
    """
    keys = []

    def fail_after(event: Event, execution: Any) -> Any:
        keys.append(execution.derive_key("charge"))
        return {"step": 17}

    behaviour["steps"] = fail_after
    deliver(Stepping, body=body_of())
    handler = Stepping.consumer._handlers["order.paid"]

    def failing(event: Event, execution: Any) -> Any:
        keys.append(handler(event, execution)["key"])
        raise ConnectionError

    Stepping.consumer._handlers["order.paid"] = failing
    try:
        for state in ("pending", "dead"):
            inbox.due_now()
            assert process_due() == {state: 1}
    finally:
        Stepping.consumer._handlers["order.paid"] = handler
    for action in actions:
        settle(inbox.row(), action, by="ann")
    assert process_due() == {"done": 1}
    assert inbox.effects() == ["steps m-1"]
    assert inbox.row().purge_at is None  # its ttl is None
    assert len({*keys}) == 1


@pytest.mark.parametrize("on_expired", ["execute", "refuse"])
def test_repeat(inbox: Inbox, settings: Any, on_expired: str) -> None:
    """Reprocessing is a further attempt from the beginning, with the same derived keys."""
    policy = {"on_expired": on_expired, "retention": timedelta(days=7)}
    settings.IDEMPOTENCY = {**settings.IDEMPOTENCY, "POLICY": policy}
    seen = []

    def note(event: Event, execution: Any) -> Any:
        seen.append((execution.attempt, execution.derive_key("charge")))

    behaviour["shop"] = note
    deliver(Hook)
    process_due()
    settle(inbox.row(), "repeat", by="ann")
    assert inbox.row().state == "pending"
    assert deliver(Hook).status_code == 200  # a redelivery changes nothing
    assert process_due() == {"done": 1}
    assert [attempt for attempt, _ in seen] == [1, 2]
    assert seen[0][1] == seen[1][1]
    assert inbox.effects() == ["shop m-1"] * 2


def test_discard(inbox: Inbox) -> None:
    """A dead letter that is discarded is never handled and may be purged."""
    behaviour["shop"] = lambda event, _: fail(event, _) if event.id == "m-1" else None
    for number in (1, 2):
        deliver(Hook, f"m-{number}", body_of(n=number))
    assert process_due() == {"pending": 1, "done": 1}
    inbox.due_now()
    assert process_due() == {"dead": 1}
    settle(inbox.row(), "discard", by="ann")
    assert inbox.row().purge_at is not None
    assert process_due() == {}
    assert inbox.states() == ["discarded", "done"]
    with pytest.raises(NotSettled, match="is now “discarded”"):
        settle(inbox.row(), "retry", by="ann")
    behaviour.clear()
    settle(inbox.row(), "repeat", by="ann")
    assert process_due() == {"done": 1}
    assert inbox.effects() == ["shop m-2", "shop m-1"]


def test_retry_now(inbox: Inbox) -> None:
    """A message that waits for its next attempt can be retried at once."""
    behaviour["shop"] = fail
    deliver(Hook)
    process_due()
    behaviour.clear()
    settle(inbox.row(), "retry", by="ann")
    assert process_due() == {"done": 1}


def test_nobody_there(inbox: Inbox) -> None:
    """A message without a receiver stays, and is handled when there is one again."""
    deliver(Hook)
    inbox.rows().update(source="gone")
    assert process_due() == {"pending": 1}
    assert "'gone'" in inbox.row().error
    with pytest.raises(NotSettled, match="'gone'"):
        inbox.rows().update(state="done")
        settle(inbox.row(), "repeat", by="ann")
    inbox.rows().update(source="shop", state="pending")
    inbox.due_now()
    assert process_due() == {"done": 1}
    assert inbox.effects() == ["shop m-1"]


def test_batches_do_not_overlap(inbox: Inbox) -> None:
    """Six processors at once: one effect for each message, none left."""
    for number in range(60):
        deliver(Hook, f"m-{number}")

    def work() -> Counter[str]:
        done = Counter[str]()
        for _ in range(100):  # each round finds what others have left
            done += process_due(batch=3)
            if not inbox.rows().filter(state="pending").exists():
                break
        return done

    tallies = in_threads([work] * 6)
    assert sum(tallies, Counter())["done"] == 60
    assert Counter(inbox.effects()) == {f"shop m-{n}": 1 for n in range(60)}
    assert {*inbox.states()} == {"done"}


def test_late_owner(inbox: Inbox) -> None:
    """A process that was late does not undo what an operator has decided meanwhile."""
    deliver(Hook)
    [late] = claim(1)
    inbox.due_now()  # its claim is over
    assert process_due() == {"done": 1}
    settle(inbox.row(), "repeat", by="ann")
    assert not mark(late, state="done", process_after=None)
    process(late)
    assert inbox.row().state == "pending"
    inbox.due_now()
    assert process_due() == {"done": 1}
    assert len(inbox.effects()) == 2


def test_stopped(inbox: Inbox) -> None:
    """Stopped in the middle of a batch: the message in hand is finished, others are free."""
    stop = threading.Event()
    behaviour["shop"] = lambda event, execution: stop.set()
    for number in range(3):
        deliver(Hook, f"m-{number}")
    assert process_due(batch=3, stop=stop) == {"done": 1}
    assert inbox.states() == ["done", "pending", "pending"]
    assert [row.attempts for row in inbox.rows()] == [1, 0, 0]
    assert process_due() == {"done": 2}


def test_other_sources_go_on_beside_one_that_hangs(
    inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message that hangs is handled once, and its source goes on after it."""
    if connections[inbox.alias].vendor == "sqlite":
        pytest.skip("SQLite has one writer")
    monkeypatch.setattr(loops, "PATIENCE", timedelta(seconds=0.05))
    monkeypatch.setattr(loops, "BEAT", 0.01)
    stop, hangs, released = threading.Event(), threading.Event(), threading.Event()

    stepping = Stepping.consumer._handlers["order.paid"]

    def hang(event: Event, execution: Any) -> Any:
        if event.id == "m-1":  # outside of the step, whose transaction would lock all of SQLite
            hangs.set()
            assert released.wait(30)
        return stepping(event, execution)

    def operator() -> None:
        try:
            assert hangs.wait(30)
            deliver(Stepping, "m-2")
            deliver(Passing, "m-3")
            eventually(lambda: inbox.row("m-3").state == "done")
            assert [inbox.row(each).state for each in ("m-1", "m-2")] == ["pending", "pending"]
            released.set()
            eventually(lambda: inbox.states() == ["done"] * 3)
        finally:
            released.set()
            stop.set()

    monkeypatch.setitem(Stepping.consumer._handlers, "order.paid", hang)
    deliver(Stepping, "m-1")
    work = partial(processing.process_batch, 10, stop, Counter())
    in_threads([lambda: run([Part("inbox", work, timedelta(seconds=0.01))], stop), operator])
    assert len(inbox.effects()) == 3


def test_purged(inbox: Inbox) -> None:
    """What is handled is purged after its ttl, the oldest first; the rest is kept."""
    for number in range(4):
        deliver(Hook, f"m-{number}")
    process_due(batch=1)
    deliver(Hook, "m-4")
    assert INBOX.purge(timedelta(0), 10) == 0
    for age, row in enumerate(inbox.rows()[:3]):
        inbox.rows().filter(pk=row.pk).update(purge_at=timezone.now() - age * DAY)
    assert INBOX.purge(DAY / 2, 1) == 1
    assert [row.message_id for row in inbox.rows()] == ["m-0", "m-1", "m-3", "m-4"]
    assert INBOX.purge(DAY / 2, 10) == 1
    assert INBOX.purge(timedelta(0), 10) == 1
    assert inbox.states() == ["done", "pending"]


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
    assert sorted(inbox.effects()) == ["shop m-1", "shop m-2"]


def test_killer_among_others(inbox: Inbox) -> None:
    """What kills each process is not the first of those that come again with it, each time."""
    for number in range(5):
        deliver(Hook, f"m-{number}")
    firsts = []
    for _ in range(30):
        firsts.append(claim(10)[0].message_id)
        inbox.due_now()
    assert firsts[0] == "m-0"
    assert len({*firsts}) > 1


def test_two_databases(inbox: Inbox) -> None:
    """Where the handlers write to another database, a record there commits with them."""
    others = [alias for alias in connections if alias != inbox.alias]
    if not others:
        pytest.skip("two databases are needed")
    elsewhere = {"BACKEND": STORE, "OPTIONS": {"using": others[0]}}
    with changed_settings(STORES={"default": elsewhere}):
        deliver(Hook)
        assert process_due() == {"done": 1}
        assert stores["default"].using == others[0]
    assert IdempotencyKey.objects.using(others[0]).count() == 1
    assert Effect.objects.using(others[0]).count() == 1


@pytest.mark.django_db(databases="__all__")
def test_in_a_transaction_of_a_test(inbox: Inbox) -> None:
    """A test whose transaction is rolled back can handle messages: its connection stays open."""
    deliver(Hook)
    connections[inbox.alias].close_at = 0  # it is too old, by CONN_MAX_AGE
    assert process_due() == {"done": 1}
    assert inbox.effects() == ["shop m-1"]
