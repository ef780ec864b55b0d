"""A chain of causes has one timeline, from whichever of its members it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest.mock import ANY

import pytest
from celery import Celery
from django.conf import settings as django_settings
from django.db import connection
from django.db.models import F
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import Client, override_settings
from django.test.utils import CaptureQueriesContext
from django.urls import path
from django.utils import timezone

from idempotency_django.contrib import timeline as timelines
from idempotency_django.contrib.celery import IdempotentTask
from idempotency_django.contrib.messaging import Consumer, Event, Relay, after_commit, publish
from idempotency_django.contrib.messaging.dead_letters import keep
from idempotency_django.contrib.messaging.errors import DeadLettered
from idempotency_django.contrib.messaging.models import InboxMessage, OutboxMessage
from idempotency_django.contrib.timeline import (
    Entry,
    Member,
    Source,
    Timeline,
    entry,
    find,
    member_of,
    register,
    trace,
)
from idempotency_django.decorators import idempotent
from idempotency_django.engine.context import ExecutionContext
from idempotency_django.engine.functions import idempotent_call
from idempotency_django.models import IdempotencyKey, IdempotencyStep
from idempotency_django.policy import Policy
from idempotency_django.stores.records import reference
from tests.contrib.timeline.messages import named, published, received
from tests.models import Effect
from tests.support.factories import record
from tests.support.plans import rows_read
from tests.support.shared import new_key, post

pytestmark = [
    pytest.mark.django_db(transaction=True, databases="__all__"),
    pytest.mark.urls(__name__),
]


@idempotent
def order(request: HttpRequest) -> HttpResponse:
    """Publishes that it was paid."""
    publish("orders", {"id": 17}, type="order.paid")
    return JsonResponse({}, status=201)


urlpatterns = [path("orders/", order)]

billing = Consumer("billing", policy=Policy(mode="leased"))
tasks: dict[str, Any] = {}


@billing.on("order.paid")
def book(event: Event, execution: ExecutionContext) -> None:
    """Sends a task for each order."""
    tasks["send"].apply_async([event.data["id"]], task_id="task-17")


OUTBOX = {
    "orders": {
        "BACKEND": "idempotency_django.contrib.messaging.LocalPublisher",
        "OPTIONS": {"consumers": [f"{__name__}.billing"]},
    }
}


@pytest.fixture
def app() -> Iterator[Celery]:
    """A Celery app whose tasks run at once."""
    with Celery("traced", broker="memory://", set_as_current=False, fixups=[]) as app:
        app.conf.task_always_eager = True
        app.conf.task_eager_propagates = True
        yield app


def traced(name: str, scope: str | None = None) -> Timeline:
    """The timeline of the one member with a name."""
    [member] = find(name, scope)
    return trace(member)


def titles(timeline: Timeline) -> list[tuple[int, str]]:
    return [(depth, member.title) for depth, member in timeline.members]


@override_settings(IDEMPOTENCY={"OUTBOX": OUTBOX})
def test_from_request_to_step(client: Client, app: Celery) -> None:
    """Request, message, consumer, task and step have one timeline, from each of its members."""

    @app.task(base=IdempotentTask, bind=True, name="send", idempotency_policy=Policy(mode="leased"))
    def send(self: Any, number: int) -> int:
        return int(self.execution.step("charge", lambda: number))

    tasks["send"] = send
    key = new_key()
    assert post(client, "/orders/", key).status_code == 201
    assert Relay().drain() == 1
    message = OutboxMessage.objects.get()
    billing.handle(
        Event(id=message.message_id, source="/orders", type=message.type, data={"id": 17})
    )
    members = IdempotencyKey.objects.order_by("pk")
    assert [row.key for row in members] == [key, message.message_id, "task-17"]
    # As on a database that tells time in milliseconds, and was fast.
    members.filter(key="task-17").update(completed_at=F("created_at"))
    IdempotencyStep.objects.update(completed_at=members.get(key="task-17").created_at)
    lines = None
    for row in [*members, message]:
        timeline = traced(*named(row).split(" ", 1))
        assert titles(timeline) == [
            (0, "POST /orders/"),
            (1, "order.paid to orders"),
            (2, "billing order.paid"),
            (3, "send"),
        ]
        assert named(row) == timeline.focus.reference
        past = [entry for entry in timeline.entries if not entry.ahead]
        assert past == sorted(past, key=lambda entry: entry.at)
        now = [(entry.member.title, entry.what) for entry in past]
        lines = lines or now
        assert now == lines
    assert list(dict.fromkeys(title for title, _ in lines)) == [
        title for _, title in titles(timeline)
    ]
    assert [[what for title, what in lines if title == each] for _, each in titles(timeline)] == [
        ["created", "completed"],
        ["published to the outbox", "done"],
        ["created", "completed", "replayed"],
        ["created", "step charge, by attempt 1", "completed"],
    ]


def send_receipt(number: int) -> None:
    """What is to be done after the commit; it asks for more."""
    idempotent_call(lambda execution: number, key=f"receipt-{number}", scope="receipts")


CELERY = {
    "celery": {
        "BACKEND": "idempotency_django.contrib.messaging.CeleryPublisher",
        "OPTIONS": {"app": f"{__name__}.celery"},
    }
}
celery = Celery("traced", broker="memory://", set_as_current=False, fixups=[])
celery.conf.task_always_eager = True


@celery.task(base=IdempotentTask, name="tests.contrib.timeline.remind")
def remind(number: int) -> None:
    """A task that is written into the outbox."""


@override_settings(IDEMPOTENCY={"OUTBOX": CELERY})
def test_after_commit() -> None:
    """A call and a task that were asked for in a transaction have the message as their cause."""

    def pay(execution: ExecutionContext) -> None:
        after_commit(send_receipt, 17)
        remind.enqueue_once(17)

    idempotent_call(pay, key="pay-17", scope="payments", name="pay")
    assert Relay().drain() == 2
    path = f"{__name__}:send_receipt"
    rows = [*IdempotencyKey.objects.all(), *OutboxMessage.objects.all()]
    assert len(rows) == 6
    for row in rows:
        member = member_of(row)
        assert member is not None
        timeline = trace(member)
        assert not timeline.more
        assert titles(timeline) == [
            (0, "pay"),
            (1, f"{path} to after_commit"),
            (2, f"after_commit {path}"),
            (3, ANY),
            (1, "tests.contrib.timeline.remind to celery"),
            (2, "tests.contrib.timeline.remind"),
        ]


def test_gaps() -> None:
    """A cause that is purged, rolled back or elsewhere is a gap, and its effects are one chain."""
    gone = reference("gone", "user:1|POST /orders/")
    first, second = record(key="first", caused_by=gone), record(key="second", caused_by=gone)
    message = published(caused_by=named(second))
    for row in (first, second, message):
        timeline = traced(*named(row).split(" ", 1))
        assert [(depth, member.kind) for depth, member in timeline.members] == [
            (0, "missing"),
            (1, "record"),
            (1, "record"),
            (2, "outbox message"),
        ]
        assert timeline.members[0][1].reference == gone
        assert {entry.member.kind for entry in timeline.entries} == {"record", "outbox message"}


@pytest.mark.skipif("connection.vendor != 'postgresql'", reason="the plan is PostgreSQL's")
def test_messages_are_in_the_index() -> None:
    """PostgreSQL finds what an operation has published by an index, not by reading all messages."""
    root = record(key="root")
    some = published()
    fields = [field.name for field in some._meta.concrete_fields if not field.primary_key]
    values = {name: getattr(some, name) for name in fields}
    OutboxMessage.objects.bulk_create(
        OutboxMessage(**{**values, "message_id": f"m-{n}", "caused_by": "" if n % 2 else f"{n} s"})
        for n in range(3000)
    )
    published(caused_by=named(root))
    with connection.cursor() as cursor:
        cursor.execute(f"ANALYZE {OutboxMessage._meta.db_table}")
    with CaptureQueriesContext(connection) as queries:
        assert len(traced("root").members) == 2
    asked = f'"{OutboxMessage._meta.db_table}"."caused_by" IN'
    by_cause = [query["sql"] for query in queries if asked in query["sql"]]
    assert len(by_cause) == 2
    assert all(rows_read("default", sql) <= 2 for sql in by_cause)


def at(columns: dict[str, Any]) -> dict[str, Any]:
    """The columns, with moments instead of what is to pass until then: tests may wait for long."""
    now = timezone.now()
    return {
        name: now + value if isinstance(value, timedelta) else value
        for name, value in columns.items()
    }


PENDING = {"state": "pending", "process_after": timedelta(minutes=5)}


@pytest.mark.parametrize(
    ("make", "columns", "told"),
    [
        (published, {}, ["published to the outbox", "done"]),
        (published, {**PENDING, "sent_at": None}, ["published to the outbox", "due"]),
        (published, {"state": "dead", "sent_at": None}, ["published to the outbox"]),
        (received, {}, ["received", "done"]),
        (received, {**PENDING, "processed_at": None}, ["received", "due"]),
    ],
)
def test_message(make: Any, columns: dict[str, Any], told: list[str]) -> None:
    """A message tells when it came and was sent or handled, or what became of it."""
    message = make(**at(columns))
    assert [entry.what for entry in traced(message.message_id).entries] == told


def test_inbox_to_record() -> None:
    """What handled a message of the inbox is its effect."""
    message = received()
    made = record(key=message.message_id, scope="webhook:stripe", caused_by=named(message))
    for row in (message, made):
        timeline = traced(*named(row).split(" ", 1))
        assert titles(timeline) == [(0, "invoice.paid from stripe"), (1, made.operation)]


@pytest.mark.parametrize("event_id", ["e-1", "évent 1"])
def test_dead(event_id: str) -> None:
    """A message that a consumer has dead-lettered belongs to the record of the attempts at it."""
    billing = Consumer("billing", max_attempts=1)

    @billing.on("order.paid")
    def book(event: Event, execution: Any) -> None:
        raise LookupError

    event = Event(id=event_id, source="/orders?é", type="order.paid")
    with pytest.raises(DeadLettered) as raised:
        billing.handle(event)
    keep(billing, event.to_json().encode(), raised.value)
    dead, made = InboxMessage.objects.get(), IdempotencyKey.objects.get()
    # Of an id that is hashed, the record does not tell what it was.
    for row in (dead,) if event_id != "e-1" else (dead, made):
        timeline = traced(*named(row).split(" ", 1))
        assert titles(timeline) == [
            (0, "billing order.paid"),
            (1, "order.paid from consumer:billing"),
        ]
    [told] = [entry for entry in timeline.entries if entry.member.row == dead]
    assert (told.what, told.member.state) == ("received", "dead")


STORES = {"default": {"BACKEND": "idempotency_django.stores.database.DatabaseStore"}}


@pytest.mark.skipif(len(django_settings.ALIASES) < 2, reason="takes two databases")
def test_two_databases() -> None:
    """A chain goes on in another database; one that is away is named, and the rest is shown."""
    default, other = list(django_settings.ALIASES.values())[:2]
    backend = "idempotency_django.stores.database.DatabaseStore"
    two = STORES | {"other": {"BACKEND": backend, "OPTIONS": {"using": other}}}
    with override_settings(IDEMPOTENCY={"STORES": two}):
        root = record(default, key="root")
        there = record(other, key="there", caused_by=named(root))
        record(default, key="back", caused_by=named(there))
        for key in ("root", "there", "back"):
            timeline = traced(key)
            assert [(depth, member.key, member.where) for depth, member in timeline.members] == [
                (0, "root", default),
                (1, "there", other),
                (2, "back", default),
            ]
        record(other, key="root")
        assert {member.where for member in find("root")} == {default, other}


class Effects(Source):
    """A project's own table, whose column ``reference`` names what has caused a row."""

    model = Effect

    @classmethod
    def everywhere(cls) -> Iterator[Source]:
        yield cls("default")

    def find(self, name: str, scope: str | None) -> Any:
        return self.members(self.rows().filter(pk=int(name))) if scope == "effects" else ()

    def member(self, row: Any) -> Member:
        return Member(
            kind="effect",
            reference=reference(str(row.pk), "effects"),
            title="an effect",
            caused_by=row.reference,
            row=row,
            source=self,
        )

    def moments(self, member: Member) -> Iterator[Entry]:
        yield entry(member, "made", member.row.now)

    def effects(self, members: Any, limit: int) -> Any:
        causes = [member.reference for member in members]
        return self.members(self.rows().filter(reference__in=causes)[:limit])


def test_own_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timeline includes the rows of a table of the project's, for which it has a source."""
    monkeypatch.setattr(timelines, "_registered", dict(timelines._registered))
    register(Effects)
    cause = record(key="order-17")
    row = Effect.objects.create(reference=named(cause))
    member = member_of(row)
    assert member is not None
    for timeline in (trace(member), traced("order-17")):
        assert titles(timeline) == [(0, cause.operation), (1, "an effect")]
        assert "made" in [entry.what for entry in timeline.entries]
