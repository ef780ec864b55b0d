"""A consumer with a filter: whatever the filter says, nothing is lost and nothing done twice."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext
from hypothesis import given, settings
from hypothesis import strategies as st

from idempotency_django.contrib.messaging import (
    Consumer,
    Duplicate,
    Event,
    Failed,
    Handled,
    SeenFilter,
)
from idempotency_django.contrib.messaging.errors import DeadLettered
from idempotency_django.errors import StoreUnavailable
from idempotency_django.models import IdempotencyKey
from idempotency_django.stores import stores
from tests.models import Effect
from tests.support.nightly import sizes
from tests.support.shared import effect_counts

from .conftest import Failing, Made, Saying

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")

SEED = int(os.environ.get("SEEN_SEED", "1"))
BATCH = 50
LIARS = {
    "always yes": lambda: Saying(verdict=True),
    "always no": lambda: Saying(verdict=False),
    "fails": lambda: Failing(verdict=True),
}


@pytest.fixture(params=LIARS)
def liar(request: pytest.FixtureRequest) -> SeenFilter:
    """A filter of which nothing that it says is to be trusted."""
    return LIARS[request.param]()


def clicks(using: str, seen: SeenFilter, **options: Any) -> Consumer:
    consumer = Consumer("clicks", seen=seen, **options)

    @consumer.on("click")
    def click(event: Event, execution: Any) -> str:
        Effect.objects.using(using).create(reference=event.id)
        if event.data == "fails":
            raise LookupError
        return event.id

    return consumer


def event(number: object, data: object = None) -> Event:
    return Event(id=f"{number}", source="/shop", type="click", data=data)


def handled_again(consumer: Consumer, each: Event) -> None:
    """Handle an event alone and in batches, with a neighbour that is new."""
    assert consumer.handle(each) == Duplicate(each.id)
    neighbour = event(f"after {each.id}")
    outcomes = consumer.handle_many([each, neighbour, each, neighbour])
    assert outcomes == [
        Duplicate(each.id),
        Handled(neighbour.id),
        Duplicate(each.id),
        Duplicate(neighbour.id),
    ]


def test_liars(using: str, liar: SeenFilter) -> None:
    """A filter that always says yes loses nothing; one that says no, or fails, repeats nothing."""
    consumer = clicks(using, liar)
    assert consumer.handle(event(1)) == Handled("1")
    handled_again(consumer, event(1))
    assert effect_counts(using) == {"1": 1, "after 1": 1}


def statements(using: str, call: Callable[[], object]) -> int:
    with CaptureQueriesContext(connections[using]) as sent:
        call()
    return len(sent)


def test_cost_of_a_duplicate(using: str, made: Made) -> None:
    """A duplicate costs one read and no transaction; on PostgreSQL, so does a batch of them."""
    consumer = clicks(using, made())
    consumer.handle_many([event(number) for number in range(20)])
    assert statements(using, lambda: consumer.handle(event(1))) == 1
    batch = [event(number) for number in reversed(range(20))]
    assert consumer.handle_many(batch) == [Duplicate(each.id) for each in batch]
    expected = 1 if connections[using].vendor == "postgresql" else len(batch)
    assert statements(using, lambda: consumer.handle_many(batch)) == expected


def test_marked_after_the_commit(using: str) -> None:
    """The filter hears of an event when it is committed, and never of one that failed."""
    told = Saying(verdict=False)
    consumer = clicks(using, told)
    seen: list[list[str]] = []

    @consumer.on("look")
    def look(event: Event, execution: Any) -> None:
        seen.append([*told.told])

    consumer.handle(Event(id="a", source="/shop", type="look"))
    with pytest.raises(LookupError):
        consumer.handle(event(1, "fails"))
    outcomes = consumer.handle_many([event(2), event(3, "fails"), event(4)])
    assert [isinstance(each, Failed) for each in outcomes] == [False, True, False]
    assert seen == [[]]
    assert [name.split()[0] for name in told.told] == ["a", "2", "4"]
    assert consumer.handle(event(1)) == Handled("1")


def test_dead(using: str) -> None:
    """What is dead-lettered stays so, whatever the filter says."""
    consumer = clicks(using, Saying(verdict=True), max_attempts=1)
    for _ in range(2):
        with pytest.raises(DeadLettered):
            consumer.handle(event(1, "fails"))
    assert effect_counts(using) == {}


def test_store_out_of_reach(using: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the store cannot be asked, the claim finds out what is wrong."""

    def unreachable(names: Any) -> Any:
        raise StoreUnavailable

    monkeypatch.setattr(stores["default"], "get_many", unreachable)
    consumer = clicks(using, Saying(verdict=True))
    assert consumer.handle(event(1)) == Handled("1")
    assert consumer.handle(event(1)) == Duplicate("1")
    assert effect_counts(using) == {"1": 1}


def test_any_verdicts(using: str) -> None:
    """Whatever a filter says of whatever is delivered, each event has one effect."""
    deliveries = st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=5), max_size=6)

    class Moody(SeenFilter):
        def __init__(self, moods: list[bool]) -> None:
            self.moods = moods

        def contains(self, ids: Any) -> list[bool]:
            return [(self.moods * 9)[at] for at, _ in enumerate(ids)]

        def add(self, ids: Any) -> None:
            self.moods = [not self.moods[0], *self.moods[1:]]

    @settings(max_examples=15, deadline=None, database=None)
    @given(deliveries, st.lists(st.booleans(), min_size=1, max_size=5))
    def check(batches: list[list[int]], moods: list[bool]) -> None:
        consumer = clicks(using, Moody(moods))
        for batch in batches:
            outcomes = consumer.handle_many([event(number) for number in batch])
            assert [o.result for o in outcomes if not isinstance(o, Failed)] == [*map(str, batch)]
        assert effect_counts(using) == {f"{number}": 1 for batch in batches for number in batch}
        Effect.objects.using(using).all().delete()
        IdempotencyKey.objects.using(using).all().delete()

    check()


@pytest.mark.timeout(0)
@pytest.mark.parametrize("number", sizes(300, 1500, "SEEN_MESSAGES"))
def test_of_many_events_none_is_lost(using: str, made: Made, number: int) -> None:
    """Of very many events, a fifth of them delivered twice, none is lost and none done twice.

    The filter is made for a tenth of them.
    """
    if using != "default" and number > 10_000:
        pytest.skip("The long run is for one database")
    chance = random.Random(SEED)
    consumer = clicks(using, made(max(100, number // 10)))
    waiting: list[int] = []
    for start in range(0, number, BATCH):
        new = [*range(start, min(start + BATCH, number))]
        batch = new + waiting
        chance.shuffle(batch)
        waiting = chance.sample(range(new[-1] + 1), BATCH // 5)
        outcomes = consumer.handle_many([event(each) for each in batch])
        assert not [outcome for outcome in outcomes if isinstance(outcome, Failed)]
    rows = Effect.objects.using(using)
    assert rows.count() == number
    assert rows.values("reference").distinct().count() == number
