"""``manage.py idempotency_status``, and the check at deploy: nothing stands still in silence."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from io import StringIO
from typing import Any, NoReturn

import pytest
from django.conf import settings
from django.core.management import CommandError, call_command
from django.db import OperationalError, connection, connections, transaction
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from idempotency_django import management
from idempotency_django.contrib.messaging import (
    Consumer,
    Event,
    Relay,
    dead_letters,
    process_due,
    publish,
)
from idempotency_django.contrib.messaging.errors import DeadLettered
from idempotency_django.contrib.messaging.models import InboxMessage, OutboxMessage
from idempotency_django.models import DatabaseNow, IdempotencyKey
from tests.contrib.messaging.settling import settle
from tests.contrib.messaging.webhooks import receivers
from tests.contrib.messaging.webhooks.receivers import Stepping, deliver
from tests.support.factories import ago, copies, record, records
from tests.support.plans import rows_read
from tests.support.reports import status as text

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")

BACKEND = "idempotency_django.stores.database.DatabaseStore"
BROKER = "tests.contrib.messaging.outbox.conftest.Broker"
SIX_HOURS = timedelta(hours=6)


@pytest.fixture(params=list(settings.ALIASES.values()), ids=list(settings.ALIASES))
def using(request: pytest.FixtureRequest) -> Iterator[str]:
    """The database of keys and messages, with a topic and the receivers of the tests."""
    configured = {
        "MESSAGING_DATABASE": request.param,
        "STORES": {"default": {"BACKEND": BACKEND, "OPTIONS": {"using": request.param}}},
        "OUTBOX": {"orders": {"BACKEND": BROKER}},
    }
    with override_settings(
        IDEMPOTENCY=configured, ROOT_URLCONF="tests.contrib.messaging.webhooks.receivers"
    ):
        yield request.param


def outbox(using: str, count: int = 1, **values: Any) -> None:
    """Messages of the outbox; by default they are due, and six hours old."""
    written = {"topic": "orders", "payload": "{}", "created_at": DatabaseNow() - SIX_HOURS}
    write(OutboxMessage, using, count, written | values)


def inbox(using: str, count: int = 1, **values: Any) -> None:
    """Messages of the inbox; by default they are due, and six hours old."""
    written = {"source": "shop", "body": b"{}", "received_at": DatabaseNow() - SIX_HOURS}
    write(InboxMessage, using, count, written | values)


def write(model: Any, using: str, count: int, values: dict[str, Any]) -> None:
    """Messages with these values, of which pending ones are due."""
    if values.get("state", "pending") == "pending":
        values = {"process_after": DatabaseNow() - SIX_HOURS, **values}
    rows = model.objects.using(using)
    first = rows.count()
    rows.bulk_create(model(message_id=f"m-{first + at}", type="t", **values) for at in range(count))


def found(max_minutes: int = 15) -> dict[tuple[str, str], management.Finding]:
    """What is found, by what and where."""
    return {
        (each.what, each.where): each
        for each in management.findings(timedelta(minutes=max_minutes))
    }


def status(max_minutes: int = 15) -> tuple[int, dict[tuple[str, str], management.Finding]]:
    """The exit code, and what is wrong, by what and where."""
    code = 0
    try:
        call_command("idempotency_status", "--max-minutes", str(max_minutes), stdout=StringIO())
    except CommandError as error:
        code = error.returncode
    return code, {name: each for name, each in found(max_minutes).items() if each.problem}


def test_nothing(using: str) -> None:
    """Where nothing waits, or nothing for too long, all is well."""
    assert status() == (0, {})
    now = DatabaseNow()
    outbox(using, 3, process_after=now, created_at=now)
    outbox(using, state="done", purge_at=now)
    inbox(using, 3, process_after=now, received_at=now)
    inbox(using, state="done", purge_at=now)
    inbox(using, process_after=now + SIX_HOURS, attempts=1, source="later")
    records(2, in_progress=True, alias=using)
    records(2, purgeable=True, alias=using)
    assert status() == (0, {})
    assert text("-v", "0") == ""
    assert re.search(r"^  outbox messages waiting +orders +3 +\d s$", text(), re.MULTILINE)


def test_nobody_sends_or_handles(using: str) -> None:
    """Messages that have been due for six hours are reported: no relay and no processor runs."""
    outbox(using, 50)
    inbox(using, 20)
    code, wrong = status()
    assert code == 1
    assert {name: each.count for name, each in wrong.items()} == {
        ("outbox messages waiting", "orders"): 50,
        ("inbox messages waiting", "shop"): 20,
    }
    assert "Run run_messaging" in wrong["outbox messages waiting", "orders"].problem
    assert "Run run_messaging" in wrong["inbox messages waiting", "shop"].problem
    assert all(
        SIX_HOURS <= (each.oldest or SIX_HOURS) < SIX_HOURS * 1.02 for each in wrong.values()
    )
    assert status(7 * 60) == (0, {})


def test_failing(using: str) -> None:
    """A message that fails again and again is reported, though a later attempt is to come."""
    again = {"process_after": DatabaseNow() + SIX_HOURS, "attempts": 3, "error": "Away"}
    outbox(using, **again)
    inbox(using, **again)
    code, wrong = status()
    assert code == 1
    assert [each.problem for each in wrong.values()] == [
        (
            "Failed, to be retried: 1, of 1 that wait. See their errors for the reason. If the "
            "broker is down, all of them wait for it."
        )
    ] * 2
    assert status(7 * 60) == (0, {})


@pytest.mark.parametrize(
    ("make", "columns", "what", "action"),
    [
        (outbox, {}, "outbox messages dead", "retry or discard them"),
        (inbox, {}, "inbox messages dead", "retry or discard them"),
    ],
)
def test_operator(
    using: str, make: Callable[..., None], columns: dict[str, Any], what: str, action: str
) -> None:
    """What waits for an operator is reported at once, however old it is, until it is settled."""
    make(using, 2, state="dead", **columns)
    code, wrong = status(7 * 24 * 60)
    assert code == 1
    [(name, each)] = wrong.items()
    assert (name[0], each.count) == (what, 2)
    assert action in each.problem


billing = Consumer("billing", max_attempts=1)


@billing.on("order.paid")
def bill(event: Event) -> NoReturn:
    """Fail, whatever the event."""
    raise ValueError(event.id)


def test_dead_letter_of_a_local_topic(using: str) -> None:
    """A message that a consumer cannot handle is reported until it is settled, and the record of
    its attempts, which is held, as well.
    """
    local = {"BACKEND": "local", "OPTIONS": {"consumers": [f"{__name__}.billing"]}}
    settings.IDEMPOTENCY["OUTBOX"] = {"orders": local}
    with transaction.atomic(using=using):
        publish("orders", {}, type="order.paid")
    Relay().drain()
    assert IdempotencyKey.objects.using(using).held().count() == 1
    _code, wrong = status()
    assert {*wrong} == {("outbox messages dead", "orders"), ("keys held", using)}
    settle(OutboxMessage.objects.using(using).get(), "discard", by="ann")
    assert status() == (0, {})


def test_dead_letters_of_the_inbox(using: str) -> None:
    """What a consumer or a receiver cannot handle is reported until it is settled."""
    settings.IDEMPOTENCY["CONSUMERS"] = [f"{__name__}.billing"]
    event = Event(id="e-1", source="/shop", type="order.paid", data={})
    with pytest.raises(DeadLettered) as dead:
        billing.handle(event)
    _code, wrong = status()
    assert [*wrong] == [("keys held", using)]  # its broker keeps the message
    dead_letters.keep(billing, event.to_json().encode(), dead.value)
    deliver(Stepping, "e-1")
    receivers.behaviour[Stepping.source] = bill
    for _ in range(Stepping.max_attempts or 0):
        InboxMessage.objects.using(using).filter(state="pending").update(process_after=ago())
        process_due()
    receivers.behaviour.clear()
    _code, wrong = status()
    assert {name: each.count for name, each in wrong.items()} == {
        ("inbox messages dead", "consumer:billing"): 1,
        ("inbox messages dead", Stepping.source): 1,
        ("keys held", using): 2,
    }
    for message in InboxMessage.objects.using(using):
        settle(message, "discard", by="ann")
    assert status() == (0, {})


def test_each_topic_and_source(using: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each topic and source has its exact number, however many another one has, or 0."""
    monkeypatch.setattr(management, "MAX_COUNTED", 10)
    settings.IDEMPOTENCY["OUTBOX"] |= {"empty": {"BACKEND": BROKER}, "few": {"BACKEND": BROKER}}
    outbox(using, 30, created_at=DatabaseNow())
    outbox(using, 5, topic="few")
    outbox(using, 25, state="dead")
    outbox(using, 2, topic="few", state="dead")
    inbox(using, 30)
    inbox(using, 5, source="github")
    counts = {name: each.count for name, each in found().items() if not each.is_bounded}
    expected = {
        ("outbox messages waiting", "orders"): 30,
        ("outbox messages waiting", "few"): 5,
        ("outbox messages waiting", "empty"): 0,
        ("outbox messages dead", "orders"): 25,
        ("outbox messages dead", "few"): 2,
        ("inbox messages waiting", "shop"): 30,
        ("inbox messages waiting", "github"): 5,
        ("inbox messages dead", "shop"): 0,
    }
    assert counts.items() >= expected.items()


def test_first_of_a_group_deleted(using: str) -> None:
    """Groups whose first message was deleted are named, until a run goes on with them."""
    for sequence in (2, 3):
        group = {"stream": "orders/g", "group": "g", "sequence": sequence}
        outbox(using, **group, process_after=None, created_at=DatabaseNow())
    _code, wrong = status()
    assert [*wrong] == [("outbox groups stopped", using)]
    assert "'orders/g'" in wrong["outbox groups stopped", using].problem
    Relay().drain()
    assert status() == (0, {})


def test_nobody_there(using: str) -> None:
    """Messages of a topic or a source that is gone are overdue like all others, with the name."""
    outbox(using, 2, topic="renamed")
    inbox(using, 3, source="gone")
    inbox(using, 4, source="consumer:gone")
    code, wrong = status(1)
    assert code == 1
    assert {name[1]: each.count for name, each in wrong.items()} == {
        "renamed": 2,
        "gone": 3,
        "consumer:gone": 4,
    }
    assert "keep the topic" in wrong["outbox messages waiting", "renamed"].problem


def test_keys(using: str) -> None:
    """Held keys are reported at once, interrupted ones when no retry has come for long."""
    records(2, held=True, alias=using)
    records(3, interrupted=True, alias=using)
    code, wrong = status(60)
    assert code == 1
    assert {name: each.count for name, each in wrong.items()} == {("keys held", using): 2}
    code, wrong = status(1)
    assert {name: each.count for name, each in wrong.items()} == {
        ("keys held", using): 2,
        ("keys interrupted", using): 3,
    }


def test_interrupted_operations_are_named(using: str) -> None:
    """The problem names the operations, those that wait longest first, each once."""
    traits = {"interrupted": True, "alias": using}
    records(2, operation="POST /slow/", lease_expires_at=ago(hours=3), **traits)
    records(1, operation="POST /pay/", lease_expires_at=ago(hours=2), **traits)
    problem = status(60)[1]["keys interrupted", using].problem
    assert problem.startswith("POST /slow/, POST /pay/: the process was killed, or took longer")


def test_no_purge(using: str) -> None:
    """Rows that were to be purged long ago are reported: no purge runs."""
    old = ago(days=5)
    records(2, purge_at=old, alias=using)
    outbox(using, 3, state="done", purge_at=old)
    inbox(using, 4, state="done", purge_at=old)
    code, wrong = status()
    assert code == 1
    assert {name: each.count for name, each in wrong.items()} == {
        ("keys to purge", using): 2,
        ("outbox messages to purge", using): 3,
        ("inbox messages to purge", using): 4,
    }


def test_table(using: str) -> None:
    """For people it prints a line for each, a mark at what is wrong, and what to do about it."""
    outbox(using, 50)
    said = text()
    assert re.search(r"^! outbox messages waiting +orders", said, re.MULTILINE)
    assert re.search(r"orders +50 +6 h$", said, re.MULTILINE)
    assert "    Overdue: 50. Run run_messaging" in said
    assert re.search(r"1 of \d+ lines need attention\.$", said)
    only = text("-v", "0")
    assert "keys held" not in only
    assert "! outbox messages waiting" in only


def test_bounded(using: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More keys than anybody wants to count are not counted."""
    monkeypatch.setattr(management, "MAX_COUNTED", 10)
    records(25, held=True, alias=using)
    _code, wrong = status()
    assert {each.count for each in wrong.values()} == {10}
    assert all(each.is_bounded for each in wrong.values())
    assert "10+" in text()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        *((each, "invalid int value") for each in ("5m", "0.5", "nan", "inf")),
        *((each, "Pass 1 to 999,999") for each in ("-5", "0", "99999999999999")),
    ],
)
def test_wrong_age(wrong: str, why: str) -> None:
    """An age that is none is refused in words."""
    with pytest.raises(CommandError, match=why):
        call_command("idempotency_status", f"--max-minutes={wrong}")


def alone(*lines: str) -> subprocess.CompletedProcess[str]:
    """Run code in a project that has nothing but the core."""
    begin = (
        "import django, sys",
        "from django.conf import settings",
        "sqlite = {'ENGINE': 'django.db.backends.sqlite3', 'NAME': ':memory:'}",
        "settings.configure(INSTALLED_APPS=['idempotency_django'], DATABASES={'default': sqlite})",
        "django.setup()",
        "from django.core.management import call_command, execute_from_command_line",
    )
    command = [sys.executable, "-c", "\n".join((*begin, *lines))]
    return subprocess.run(command, capture_output=True, encoding="utf-8", check=False, timeout=60)


def test_without_messaging() -> None:
    """A project without the messaging app has a report of its keys."""
    run = alone(
        "call_command('migrate', verbosity=0)",
        "call_command('idempotency_status')",
        "assert not [name for name in sys.modules if name.startswith('idempotency_django.messag')]",
    )
    assert run.returncode == 0, run.stderr
    assert [line.split()[:2] for line in run.stdout.splitlines()] == [
        ["What", "Where"],
        ["keys", "held"],
        ["keys", "interrupted"],
        ["keys", "to"],
    ]


def broken(*_: object) -> NoReturn:
    """Stands for each statement that a server does not reply to."""
    raise OperationalError("no such table")


@pytest.mark.parametrize(
    ("configured", "error"),
    [
        ({}, "no such table. Check the settings, and that the database is migrated."),
        ({"STORES": {"default": {"BACKEND": "nowhere.Store"}}}, "nowhere"),
    ],
    ids=["unreachable", "wrong settings"],
)
def test_programs_are_told_why_nothing_is_known(
    configured: dict[str, Any], error: str, settings: Any
) -> None:
    """The command says what is wrong, of the database or the settings, and ends with 2."""
    settings.IDEMPOTENCY = configured
    with (
        connection.execute_wrapper(broken),
        pytest.raises(CommandError) as ended,
    ):
        call_command("idempotency_status", stdout=StringIO())
    assert ended.value.returncode == 2
    assert error in str(ended.value)


def asked(using: str) -> list[str]:
    """The statements of a report amid many rows that are done, and a few that wait."""
    later = ago(days=-1)
    outbox(using, 3000, state="done", purge_at=later)
    inbox(using, 3000, state="done", purge_at=later)
    copies(3000, record(using, purge_at=later))
    for state in ("pending", "dead"):
        outbox(using, 5, state=state)
        inbox(using, 5, state=state)
    records(5, held=True, alias=using)
    with CaptureQueriesContext(connections[using]) as queries:
        list(management.findings(timedelta(minutes=15)))
    # One reads the few processes that run.
    statements = [query["sql"] for query in queries if "runningprocess" not in query["sql"]]
    assert (len(queries), len(statements)) == (15, 14)
    return statements


def on(vendor: str) -> pytest.MarkDecorator:
    """Runs a test on this database."""
    return pytest.mark.parametrize(
        "using", [settings.ALIASES[vendor]] if vendor in settings.ALIASES else [], indirect=True
    )


@pytest.mark.nightly
@on("postgres")
def test_plans(using: str) -> None:
    """Among many rows that are done, it reads those only that wait."""
    statements = asked(using)
    with connections[using].cursor() as cursor:
        for model in (IdempotencyKey, InboxMessage, OutboxMessage):
            cursor.execute(f"ANALYZE {model._meta.db_table}")
    for statement in statements:
        assert rows_read(using, statement) <= 20, statement


@on("mariadb")
def test_plans_of_mariadb(using: str) -> None:
    """MariaDB finds messages by indexes, too; it has none for keys that are in progress."""
    statements = asked(using)
    with connections[using].cursor() as cursor:
        for statement in statements:
            cursor.execute(f"EXPLAIN {statement}")
            columns = [column[0] for column in cursor.description]
            row = dict(zip(columns, cursor.fetchone(), strict=True))
            if "status" not in statement or "messaging" in statement:
                assert row["type"] != "ALL", statement
                assert int(str(row["rows"]).split()[0]) <= 20, statement


@on("sqlite")
def test_plans_of_sqlite(using: str) -> None:
    """SQLite finds what waits by an index, too."""
    statements = asked(using)
    with connections[using].cursor() as cursor:
        for statement in statements:
            cursor.execute(f"EXPLAIN QUERY PLAN {statement}")
            plan = " ".join(row[-1] for row in cursor.fetchall())
            assert plan.startswith("SEARCH"), (plan, statement)
