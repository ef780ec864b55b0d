"""The row of a message is the record of its handler, and is completed with what that writes."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import patch

import pytest
from django.conf import settings
from django.db import IntegrityError, OperationalError, connections, transaction
from django.test.utils import CaptureQueriesContext, override_settings

from idempotency_django.contrib.messaging import Event, process_due, publish
from idempotency_django.contrib.messaging.inbox.processing import claim, process
from idempotency_django.contrib.messaging.models import InboxMessage, OutboxMessage
from idempotency_django.contrib.messaging.settling import NotSettled, repeat, retry
from idempotency_django.errors import StoreUnavailable
from idempotency_django.models import IdempotencyKey
from idempotency_django.policy import Policy
from idempotency_django.stores import stores
from idempotency_django.stores.database import DatabaseStore
from tests.models import Effect

from .conftest import Inbox
from .receivers import Hook, Stepping, behaviour, body_of, deliver

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")


def records(inbox: Inbox) -> int:
    return IdempotencyKey.objects.using(inbox.alias).count()


@pytest.mark.parametrize(("group", "more"), [("", 0), ("g", 1)], ids=["ungrouped", "grouped"])
def test_statements(inbox: Inbox, group: str, more: int) -> None:
    """A message takes six statements besides the handler's own, and two commits."""
    deliver(Hook, body=body_of(group=group))
    with CaptureQueriesContext(connections[inbox.alias]) as captured:
        assert process_due(batch=1) == {"done": 1}
    sent = [each["sql"] for each in captured]
    control = ("BEGIN", "COMMIT", "SET SESSION")  # of a new connection
    statements = [sql for sql in sent if not sql.startswith(control)]
    effects = [sql for sql in statements if Effect._meta.db_table in sql]
    looked_again = 2  # the next round, which finds nothing, and no group whose first is gone
    assert len(effects) == 1
    assert len(statements) - len(effects) - looked_again <= 6 + more
    assert sum(sql == "COMMIT" for sql in sent) == 2
    assert records(inbox) == 0


def test_publish(inbox: Inbox) -> None:
    """What the handler publishes is committed with its row, which it names as its cause."""
    topics = {"orders": {"BACKEND": "tests.contrib.messaging.outbox.conftest.Broker"}}
    behaviour["shop"] = lambda event, execution: publish("orders", 1, type="paid")
    with override_settings(IDEMPOTENCY={**settings.IDEMPOTENCY, "OUTBOX": topics}):
        deliver(Hook)
        assert process_due() == {"done": 1}
    assert OutboxMessage.objects.using(inbox.alias).get().caused_by == "m-1 inbox:shop"


def fails_with(error: BaseException) -> Any:
    def handle(event: Event, execution: Any) -> None:
        raise error

    return handle


@pytest.mark.parametrize(
    "error", [IntegrityError("twice"), OperationalError("deadlock detected"), ValueError()]
)
def test_errors(inbox: Inbox, error: Exception) -> None:
    """What the handler raises rolls back what it wrote, and is counted."""
    behaviour["shop"] = fails_with(error)
    deliver(Hook)
    assert process_due() == {"pending": 1}
    assert inbox.effects() == []
    row = inbox.row()
    assert (row.state, row.attempts, row.ended) == ("pending", 1, 1)
    assert row.error.startswith(type(error).__name__)


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


def test_commit_that_the_driver_makes_holds_the_message(inbox: Inbox) -> None:
    """With on_interrupted="hold", a handler that has committed and failed is not run again."""
    hold = Policy(on_interrupted="hold")

    def handle(event: Event, execution: Any) -> None:
        connections[inbox.alias].connection.commit()
        raise ConnectionError

    behaviour["shop"] = handle
    deliver(Hook)
    for tally in ({"dead": 1}, {}):
        with patch.object(Hook, "policy", hold):
            assert process_due() == tally
        inbox.due_now()
    assert inbox.effects() == ["shop m-1"]
    assert inbox.row().error


def test_hook_that_fails(inbox: Inbox, caplog: pytest.LogCaptureFixture) -> None:
    """An error after the commit changes nothing: the message is done, and the log says so."""

    def hook() -> None:
        raise ConnectionError

    def handle(event: Event, execution: Any) -> None:
        transaction.on_commit(hook, using=inbox.alias)

    behaviour["shop"] = handle
    deliver(Hook)
    assert process_due() == {"done": 1}
    assert "was handled and committed" in caplog.text
    assert "Another attempt" not in caplog.text
    assert process_due() == {}
    assert (inbox.effects(), inbox.row().state) == (["shop m-1"], "done")


def test_late_owner(inbox: Inbox) -> None:
    """A process whose claim another one has taken over does not call the handler any more."""
    deliver(Hook)
    [late] = claim((), 1)
    inbox.due_now()
    [successor] = claim((), 1)
    assert process(late) == "pending"
    assert inbox.effects() == []
    assert (inbox.row().attempts, inbox.row().state) == (2, "pending")
    assert process(successor) == "done"
    assert process(late) == "pending"
    assert inbox.effects() == ["shop m-1"]
    assert inbox.row().state == "done"


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
        [message] = claim((), 1)
        inbox.due_now()  # its claim is over
        tallies.append(process(message))
        connections.close_all()

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(30)
    assert process_due() == {}
    with pytest.raises(NotSettled, match="is being handled"):
        retry(inbox.row(), by="ann")
    go_on.set()
    thread.join()
    assert tallies == ["done"]
    assert inbox.effects() == ["shop m-1"]
    assert inbox.row().attempts == 1


def test_interrupted(inbox: Inbox) -> None:
    """Attempts whose processes died count; the handler is told, until there are no more."""
    told = []
    behaviour["shop"] = lambda event, execution: told.append(
        (execution.attempt, execution.interrupted)
    )
    deliver(Hook)
    claim((), 1)  # by a process that dies
    inbox.due_now()
    assert process_due() == {"done": 1}
    assert told == [(2, True)]
    repeat(inbox.row(), by="ann")
    assert process_due() == {"done": 1}
    assert told[1:] == [(3, False)]


def test_interrupted_too_often(inbox: Inbox) -> None:
    """What kills each process is dead after max_attempts, without being begun again."""
    deliver(Hook)
    for _ in range(2):
        claim((), 1)
        inbox.due_now()
    assert process_due() == {"dead": 1}
    assert inbox.effects() == []
    assert inbox.row().error
    retry(inbox.row(), by="ann")
    assert process_due() == {"done": 1}


def test_killed_with_another(inbox: Inbox) -> None:
    """A process that dies costs the messages that it had claimed, and not begun, no attempt."""
    for number in (1, 2):
        deliver(Hook, f"m-{number}")
    for _ in range(3):
        assert len(claim((), 10)) == 2  # by a process that dies in the first one
        inbox.due_now()
        inbox.rows().filter(message_id="m-2").update(process_after="2020-01-02T00:00:00Z")
    assert [row.attempts for row in inbox.rows()] == [3, 0]
    assert process_due() == {"dead": 1, "done": 1}
    assert inbox.effects() == ["shop m-2"]


def test_busy(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt that could not begin is none."""

    def refuse(self: Any, **_: Any) -> Any:
        raise StoreUnavailable

    deliver(Hook)
    with monkeypatch.context() as patched:
        patched.setattr(DatabaseStore, "transaction", refuse)
        assert process_due() == {"pending": 1}
    assert (inbox.row().attempts, inbox.row().ended) == (0, 0)
    inbox.due_now()
    assert process_due() == {"done": 1}
    assert inbox.row().attempts == 1


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
    with patch.object(Hook, "policy", Policy(mode="leased")):
        assert derived(inbox) == first
    assert records(inbox) == 1


def test_key_that_is_gone(inbox: Inbox) -> None:
    """Without the key that it was derived under, another attempt would derive another key."""
    deliver(Hook)
    derived(inbox)
    behaviour.clear()
    inbox.due_now()
    with override_settings(SECRET_KEY="another"):
        assert process_due() == {"dead": 1}
    assert inbox.effects() == []


def test_messages_of_before(inbox: Inbox) -> None:
    """A message that was stored before the row was the record has a record still."""
    deliver(Hook)
    inbox.rows().update(fingerprint="")
    assert process_due() == {"done": 1}
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
