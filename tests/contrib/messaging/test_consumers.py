"""Consumers: each event has its effect once per consumer, whatever its transport does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, transaction
from django.test import override_settings

from idempotency_django.contrib.messaging import Consumer, Duplicate, Event, Failed, Handled
from idempotency_django.contrib.messaging.errors import DeadLettered, UnknownEventType
from idempotency_django.engine.context import ExecutionContext, current_execution
from idempotency_django.engine.functions import idempotent_call
from idempotency_django.errors import FingerprintMismatch, OperationInProgress
from idempotency_django.models import IdempotencyKey
from idempotency_django.policy import Policy
from idempotency_django.testing import PATIENCE, in_threads
from tests.contrib.messaging import events
from tests.models import Effect
from tests.support.admin_pages import act, member, messages
from tests.support.shared import effects

pytestmark = pytest.mark.django_db(transaction=True)

STORES = {
    "default": {"BACKEND": "idempotency_django.stores.database.DatabaseStore"},
    "memory": {"BACKEND": "idempotency_django.stores.memory.MemoryStore"},
}
WAYS = {
    "transactional": {},
    "leased": {"policy": Policy(mode="leased")},
    "memory": {"policy": Policy(store="memory")},
}


@pytest.fixture(autouse=True)
def _stores() -> Iterator[None]:
    with override_settings(IDEMPOTENCY={"STORES": STORES}):
        yield


@pytest.fixture(params=WAYS)
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return WAYS[request.param]


def paid(number: str = "1", /, **changes: Any) -> Event:
    """An event with the reference of its effect."""
    return events.paid(number, **{"data": {"reference": "a"}, **changes})


class Poison(Exception):
    """What a handler raises of an event that it cannot handle."""


def book(event: Event, execution: ExecutionContext) -> dict[str, Any]:
    """Make the effect; what is poison fails after it."""
    Effect.objects.create(reference=event.data["reference"])
    if event.data.get("poison"):
        raise Poison(event.id)
    return {"id": event.id, "attempt": execution.attempt}


def consumer(name: str = "billing", /, handler: Any = book, **options: Any) -> Consumer:
    """A consumer of events of the type ``order.paid``."""
    made = Consumer(name, **options)
    made.on("order.paid")(handler)
    return made


class TestOnce:
    def test_duplicate(self, options: dict[str, Any]) -> None:
        """The first delivery is handled; each later one gets its result."""
        billing = consumer(**options)
        result = {"id": "1", "attempt": 1}
        assert billing.handle(paid()) == Handled(result)
        for _ in range(2):
            assert billing.handle(paid()) == Duplicate(result)
        assert effects() == 1
        assert billing.handle(paid("2")) == Handled({"id": "2", "attempt": 1})
        assert effects() == 2

    def test_two_sources(self) -> None:
        """An id is unique within its source, not beyond it."""
        billing = consumer()
        for source in ("/shop", "/shop:1", "/Shop", "/shop "):
            assert isinstance(billing.handle(paid(source=source)), Handled), source
        assert effects() == 4

    def test_concurrent_duplicates(self, options: dict[str, Any]) -> None:
        """Of thirty simultaneous deliveries one is handled; the others learn of it or come back."""
        billing = consumer(**options)

        def deliver() -> str:
            try:
                return type(billing.handle(paid())).__name__
            except OperationInProgress:
                return "in progress"

        outcomes = in_threads([deliver] * 30)
        assert outcomes.count("Handled") == 1
        assert set(outcomes) <= {"Handled", "Duplicate", "in progress"}
        assert effects() == 1
        assert isinstance(billing.handle(paid()), Duplicate)

    def test_lifetime(self) -> None:
        """An event is remembered for 30 days, or as long as the consumer or its policy says."""
        hour, day = timedelta(hours=1), timedelta(days=1)
        lifetimes = {
            "a": (consumer("a"), timedelta(days=30)),
            "b": (consumer("b", policy=Policy(ttl=day)), day),
            "c": (consumer("c", policy=Policy(ttl=day), ttl=hour), hour),
        }
        for name, (each, lifetime) in lifetimes.items():
            each.handle(paid())
            row = IdempotencyKey.objects.get(scope=f"consumer:{name}:/shop")
            assert row.expires_at - row.completed_at == pytest.approx(
                lifetime, abs=timedelta(minutes=1)
            )
        forever = consumer("d", ttl=None)
        forever.handle(paid())
        assert IdempotencyKey.objects.get(scope="consumer:d:/shop").expires_at is None

    def test_what_a_handler_causes(self) -> None:
        """What a handler does once in its turn names the event's record, alone or in a batch."""

        called = []

        def cause(event: Event, execution: ExecutionContext) -> None:
            called.append(event.id)
            assert current_execution() is execution
            idempotent_call(lambda _: None, key=f"call-{event.id}", scope="calls")

        billing = consumer("billing", cause)
        billing.handle(paid("0"))
        billing.handle_many([paid("1"), paid("2")])
        assert current_execution() is None
        assert called == ["0", "1", "2"]
        calls = IdempotencyKey.objects.filter(scope="calls").order_by("key")
        assert [row.caused_by for row in calls] == [
            f"{at} consumer:billing:/shop" for at in range(3)
        ]


class TestIdentity:
    @pytest.mark.parametrize("name", ["ü", "\x00", "x" * 10_000, "\ud800", " "])
    def test_any_text(self, name: str) -> None:
        """Any text is an id; two that differ are two events."""
        billing = consumer()
        assert isinstance(billing.handle(paid(name)), Handled)
        assert isinstance(billing.handle(paid(name + "'")), Handled)
        assert isinstance(billing.handle(paid(name)), Duplicate)
        assert effects() == 2

    @pytest.mark.parametrize(
        "other",
        [
            {"data": {"reference": "b"}},
            {"data": None},
            {"type": "order.refunded"},
            {"subject": "b"},
        ],
    )
    def test_same_id_with_another_body(self, other: dict[str, Any]) -> None:
        """Another event under the same id is neither handled nor replayed."""
        billing = consumer()
        billing.on("order.refunded")(book)
        billing.handle(paid())
        with pytest.raises(FingerprintMismatch, match="The event '1' of '/shop' for billing order"):
            billing.handle(paid(**other))
        assert Effect.objects.count() == 1

    def test_equal_data(self) -> None:
        """The same content in another order, sent at another time, is the same event."""
        billing = consumer()
        billing.handle(paid(data={"reference": "a", "amount": 5}))
        again = Event.from_json(
            '{"specversion":"1.0","type":"order.paid","source":"/shop","id":"1",'
            '"time":"2031-05-07T09:30:00Z","data":{"amount":5,"reference":"a"}}'
        )
        assert isinstance(billing.handle(again), Duplicate)

    def test_unknown_type(self) -> None:
        """An unknown type is refused before the claim: a later deployment can handle the event."""
        billing = consumer()
        event = paid(type="order.lost")
        with pytest.raises(UnknownEventType, match=r"order\.lost.*order\.paid"):
            billing.handle(event)
        assert IdempotencyKey.objects.count() == 0
        assert not billing.handles("order.lost")
        billing.on("order.lost")(book)
        assert billing.handles("order.lost")
        assert isinstance(billing.handle(event), Handled)

    def test_any_type(self) -> None:
        """A handler for "*" gets the events of all types that have no other."""
        billing = consumer()
        billing.on("*")(lambda event: "any")
        assert billing.handles("order.lost")
        assert billing.handle(paid(type="order.lost")) == Handled("any")
        assert billing.handle(paid("2")) != Handled("any")

    @pytest.mark.parametrize(
        ("handler", "called_with"),
        [
            (lambda event: 1, 1),
            (lambda event, **more: 1, 1),
            (lambda event, execution=None: 2 if execution else 0, 2),
            (lambda *given: len(given), 2),
        ],
    )
    def test_takes_the_execution(self, handler: Any, called_with: int) -> None:
        """A handler gets the execution if it can be called with two arguments."""
        billing = Consumer("billing")
        billing.on("order.paid")(handler)
        assert billing.handle(paid()) == Handled(called_with)

    def test_two_handlers(self) -> None:
        """A type has one handler."""
        with pytest.raises(ValueError, match="already has a handler"):
            consumer().on("order.lost", "order.paid")
        with pytest.raises(TypeError, match="takes types of events"):
            consumer().on()
        with pytest.raises(TypeError, match=r'in parentheses: on\("order.paid"\)'):
            consumer().on(lambda event, execution: None)  # type: ignore[arg-type]


class TestSteps:
    """A consumer whose handlers have steps is leased by its policy."""

    def test_leased(self) -> None:
        """Its handlers are in no transaction, and a later attempt goes on after the last step."""
        billing, fails = Consumer("billing", policy=Policy(mode="leased")), [True]

        @billing.on("order.paid")
        def pay(event: Event, execution: ExecutionContext) -> Any:
            assert not connection.in_atomic_block
            paid = execution.step("pay", lambda: Effect.objects.create(reference="a").pk)
            if fails:
                fails.clear()
                raise Poison
            return paid

        billing.validate()
        with pytest.raises(Poison):
            billing.handle(paid())
        assert isinstance(billing.handle(paid(), redelivered=True), Handled)
        assert isinstance(billing.handle(paid(), redelivered=True), Duplicate)
        assert effects() == 1

    @pytest.mark.parametrize("redelivered", [False, True])
    @pytest.mark.parametrize("many", [False, True])
    def test_transactional(self, *, redelivered: bool, many: bool) -> None:
        """A step of another consumer is refused before it begins, however the claim is made."""

        def pay(event: Event, execution: ExecutionContext) -> Any:
            return execution.step("pay", Effect.objects.create, reference="a")

        billing = consumer("billing", pay)
        with pytest.raises(ImproperlyConfigured, match=r"'pay' cannot be stored.*mode='leased'"):
            if many:
                [failed] = billing.handle_many([paid()])
                raise failed.error
            billing.handle(paid(), redelivered=redelivered)
        assert effects() == 0


class TestFailures:
    def test_rolled_back(self, options: dict[str, Any]) -> None:
        """A handler that fails raises, and the next delivery runs it again."""
        failing = [True]

        def once(event: Event, execution: ExecutionContext) -> int:
            with transaction.atomic():
                Effect.objects.create(reference="a")
                if failing.pop():
                    failing.append(False)
                    raise Poison
            return execution.attempt

        billing = consumer("billing", once, **options)
        with pytest.raises(Poison):
            billing.handle(paid())
        assert effects() == 0
        assert billing.handle(paid()) == Handled(2)
        assert effects() == 1

    @pytest.mark.parametrize("redelivered", [False, True])
    def test_dead(self, options: dict[str, Any], redelivered: bool) -> None:
        """After max_attempts failures the event is dead-lettered, and no delivery runs it."""
        calls = []

        def poison(event: Event, execution: ExecutionContext) -> None:
            calls.append(execution.attempt)
            raise Poison("not today")

        billing = consumer("billing", poison, max_attempts=3, **options)
        for _ in range(2):
            with pytest.raises(Poison):
                billing.handle(paid(), redelivered=redelivered)
        with pytest.raises(DeadLettered, match=r"'1' of '/shop'.*Attempt 3") as last:
            billing.handle(paid(), redelivered=redelivered)
        assert isinstance(last.value.__cause__, Poison)
        assert "If the inbox in the admin has the message, retry it there" in str(last.value)
        for _ in range(2):
            with pytest.raises(DeadLettered) as again:
                billing.handle(paid(), redelivered=redelivered)
            assert again.value.__cause__ is None
        assert calls == [1, 2, 3]
        assert billing.handle_many([paid()])[0].rejected

    def test_released(self, caplog: pytest.LogCaptureFixture) -> None:
        """An operator who releases a dead-lettered event has the next delivery run it once more."""
        healthy = []

        def sometimes(event: Event, execution: ExecutionContext) -> int:
            Effect.objects.create(reference="a")
            if not healthy:
                raise Poison("the reason")
            return execution.attempt

        billing = consumer("billing", sometimes, max_attempts=1)
        with pytest.raises(DeadLettered):
            billing.handle(paid())
        row = IdempotencyKey.objects.held().get()
        assert "the reason" in row.error
        _settle(row, "release")
        caplog.clear()
        with pytest.raises(DeadLettered):  # it fails again: it has no attempts left
            billing.handle(paid())
        assert "is held after attempt 2 (max_attempts=1), until" in caplog.text
        _settle(IdempotencyKey.objects.get(), "release")
        healthy.append(True)
        assert billing.handle(paid()) == Handled(3)
        assert effects() == 1

    @pytest.mark.parametrize(("body", "result"), [('{"given": "up"}', {"given": "up"}), ("", None)])
    def test_given_up(self, body: str, result: Any) -> None:
        """A dead letter that an operator completes is a duplicate from then on, in any body."""
        billing = consumer(max_attempts=1)
        poison = paid(data={"reference": "a", "poison": True})
        with pytest.raises(DeadLettered):
            billing.handle(poison)
        row = IdempotencyKey.objects.held().get()
        _settle(row, "complete", body=body)
        assert billing.handle(poison) == Duplicate(result)
        neighbour = paid("2")
        assert billing.handle_many([neighbour, poison])[1] == Duplicate(result)
        assert billing.handle(neighbour) == Duplicate({"id": "2", "attempt": 1})

    def test_in_progress_elsewhere(self) -> None:
        """Who finds an event in progress learns how long the lease still runs, to come back."""
        started, finish = threading.Event(), threading.Event()

        def slow(event: Event, execution: ExecutionContext) -> None:
            started.set()
            assert finish.wait(PATIENCE)

        billing = consumer("billing", slow, policy=Policy(mode="leased"))

        def duplicate() -> tuple[OperationInProgress, Failed]:
            assert started.wait(PATIENCE)
            try:
                with pytest.raises(OperationInProgress) as told:
                    billing.handle(paid())
                [failed] = billing.handle_many([paid()])
            finally:
                finish.set()
            assert isinstance(failed, Failed)
            return told.value, failed

        _, (told, failed) = in_threads([lambda: billing.handle(paid()), duplicate])
        assert told.remaining is not None
        assert 0 < told.remaining <= 30
        assert told.foreign
        assert not failed.rejected

    def test_open_transaction(self) -> None:
        """Within a transaction nothing would be committed at the return, so nothing is done."""
        billing = consumer()
        with transaction.atomic(), pytest.raises(ImproperlyConfigured, match="within a transact"):
            billing.handle(paid())
        with transaction.atomic(), pytest.raises(ImproperlyConfigured, match="within a transact"):
            billing.handle_many([paid()])
        assert effects() == 0

    def test_policy(self) -> None:
        """A policy that checks the caller of a request is refused."""
        with pytest.raises(ImproperlyConfigured, match="check_replay"):
            Consumer("billing", policy=Policy(check_replay=lambda request, record: None))


def _settle(row: IdempotencyKey, outcome: str, **given: Any) -> None:
    client = member("view_idempotencykey", "settle")
    form = {"outcome": outcome, "reason": "Mended.", "status": 200, "body": "{}"} | given
    told = messages(act(client, "settle", row, **form))
    assert told == ["1 idempotency key: settled."]


def test_async_handler() -> None:
    """No transaction can span a coroutine, so an async handler is refused when it is registered."""

    async def asynchronous(event: Event) -> None: ...

    with pytest.raises(ImproperlyConfigured, match=r"is async.*async_to_sync"):
        Consumer("billing").on("order.paid")(asynchronous)


class TestBatches:
    """``handle_many``: one transaction where all goes well, and nobody's failure is another's."""

    def test_all_are_handled(self, options: dict[str, Any]) -> None:
        """Each event of a batch is handled once; delivered again, each gets its result."""
        billing = consumer(**options)
        batch = [paid(f"{number}") for number in range(7)]
        results = [{"id": f"{number}", "attempt": 1} for number in range(7)]
        assert billing.handle_many(batch) == [Handled(result) for result in results]
        assert billing.handle_many(batch) == [Duplicate(result) for result in results]
        assert effects() == 7
        assert billing.handle_many([]) == []

    def test_a_duplicate_beside_a_failing_commit(self) -> None:
        """What a batch executes beside a duplicate is never lost with the count of the replay."""

        def dangle(event: Event) -> None:
            Effect.objects.create(reference=event.id)
            if event.id == "bad":  # the COMMIT refuses it, not the INSERT
                LogEntry.objects.create(user_id=-1, action_flag=1, object_repr="")

        billing = consumer("dangling", dangle)
        billing.handle(paid("1"))
        outcomes = billing.handle_many([paid("1"), paid("2"), paid("bad"), paid("3")])
        assert [type(each) for each in outcomes] == [Duplicate, Handled, Failed, Handled]
        assert sorted(Effect.objects.values_list("reference", flat=True)) == ["1", "2", "3"]
        records = IdempotencyKey.objects.filter(status="completed")
        assert sorted(records.values_list("key", flat=True)) == ["1", "2", "3"]
        billing.handle_many([paid("2"), paid("4")])
        assert records.get(key="2").replay_count == 1

    def test_twice_in_one_batch(self, options: dict[str, Any]) -> None:
        """An event that a batch has twice is handled once, and the second gets its result."""
        billing = consumer(**options)
        ids = ["1", "2", "1", "3", "1", "2"]
        outcomes = billing.handle_many([paid(each) for each in ids])
        kinds = [Handled, Handled, Duplicate, Handled, Duplicate, Duplicate]
        assert [type(outcome) for outcome in outcomes] == kinds
        assert [outcome.result["id"] for outcome in outcomes] == ids
        assert effects() == 3

    def test_another_body_in_one_batch(self, options: dict[str, Any]) -> None:
        """Two events of one id in a batch: the second is refused, the others are handled."""
        billing = consumer(**options)
        other = paid("1", data={"reference": "b"})
        outcomes = billing.handle_many([paid("1"), other, paid("2")])
        assert [type(outcome) for outcome in outcomes] == [Handled, Failed, Handled]
        assert isinstance(outcomes[1].error, FingerprintMismatch)
        assert outcomes[1].rejected
        assert (effects("a"), effects("b")) == (2, 0)

    @pytest.mark.parametrize("places", [{3}, {0, 1, 6}, set(range(7))])
    def test_poison(self, options: dict[str, Any], places: set[int]) -> None:
        """Poison fails alone; its neighbours commit, in their order."""
        billing = consumer(max_attempts=2, **options)
        batch = [
            paid(f"{at}", data={"reference": f"{at}", "poison": at in places}) for at in range(7)
        ]
        outcomes = billing.handle_many(batch)
        assert [isinstance(outcome, Failed) for outcome in outcomes] == [
            at in places for at in range(7)
        ]
        for at in places:
            assert isinstance(outcomes[at].error, Poison)
            assert not outcomes[at].rejected
        if "store" not in options and "policy" not in options:
            healthy = [f"{at}" for at in range(7) if at not in places]
            assert [each.reference for each in Effect.objects.order_by("pk")] == healthy
        again = billing.handle_many(batch)
        for at, outcome in enumerate(again):
            assert isinstance(outcome, Failed if at in places else Duplicate)
            if at in places:
                assert isinstance(outcome.error, DeadLettered)
                assert isinstance(outcome.error.__cause__, Poison)
                assert outcome.rejected

    def test_nothing_is_half_done(self) -> None:
        """A process that ends in the middle of a batch leaves nothing of it."""

        def quit_at_three(event: Event, execution: ExecutionContext) -> None:
            Effect.objects.create(reference="a")
            if event.id == "3":
                raise KeyboardInterrupt

        billing = consumer("billing", quit_at_three)
        with pytest.raises(KeyboardInterrupt):
            billing.handle_many([paid(f"{number}") for number in range(5)])
        assert effects() == 0
        assert IdempotencyKey.objects.count() == 0

    @pytest.mark.parametrize("recovers", [False, True])
    def test_around_a_failure(self, recovers: bool) -> None:
        """After a failure each runs alone, in their order."""
        committed: list[str] = []
        seen: list[tuple[str, str]] = []

        def note(event: Event, execution: ExecutionContext) -> None:
            transaction.on_commit(lambda: committed.append(event.id))
            again = ("2", "") in seen
            seen.append((event.id, "".join(committed)))
            if event.id == "2" and not (again and recovers):
                raise Poison

        consumer("billing", note).handle_many([paid(f"{number}") for number in range(5)])
        first = [("0", ""), ("1", ""), ("2", "")]
        done = "012" if recovers else "01"
        alone = [("0", ""), ("1", "0"), ("2", "01"), ("3", done), ("4", f"{done}3")]
        assert seen == [*first, *alone]
        assert committed == [*done, "3", "4"]

    def test_hidden_rollback(self) -> None:
        """The same where Django has marked the transaction for rollback."""

        def spoil(event: Event, execution: ExecutionContext) -> None:
            Effect.objects.create(reference=event.id)
            if event.id == "1":
                transaction.set_rollback(True)

        outcomes = consumer("billing", spoil).handle_many([paid(f"{at}") for at in range(3)])
        assert [type(outcome) for outcome in outcomes][::2] == [Handled, Handled]
        assert [effects(f"{at}") for at in range(3)] == [1, 0, 1]

    def test_concurrent_batches(self) -> None:
        """Batches that overlap, in any order, handle each event once, and none waits forever."""
        billing = consumer()
        numbers = list(range(20))
        shuffled = [numbers, numbers[::-1], numbers[10:] + numbers[:10]] * 2

        def deliver(order: list[int]) -> list[str]:
            outcomes = billing.handle_many([paid(f"{at}") for at in order])
            return [outcome.result["id"] for outcome in outcomes if isinstance(outcome, Handled)]

        handled = in_threads([lambda order=order: deliver(order) for order in shuffled])
        # Who found an event in progress tries again later, as its transport would.
        handled.append(deliver(numbers))
        assert sorted(each for ids in handled for each in ids) == sorted(f"{at}" for at in numbers)
        assert effects() == 20
