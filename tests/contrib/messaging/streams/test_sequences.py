"""Of a peer's messages, each number is accepted once, and none is left out."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import OperationalError, connections, transaction
from hypothesis import example, given, settings
from hypothesis import strategies as st

from idempotency_django.contrib.messaging.models import StreamPosition
from idempotency_django.contrib.messaging.streams import (
    Accepted,
    Duplicate,
    Fenced,
    OutOfOrder,
    accept,
)
from idempotency_django.testing.contract import in_threads
from tests.models import Effect

pytestmark = [pytest.mark.django_db(transaction=True, databases="__all__"), pytest.mark.driver]

PEER = "peer-7"


def take(using: str, epoch: int, sequence: int) -> Any:
    """What a receiver does with a message."""
    with transaction.atomic(using=using):
        outcome = accept(PEER, epoch=epoch, sequence=sequence, using=using)
        if isinstance(outcome, Accepted):
            Effect.objects.using(using).create(reference=f"{epoch}:{sequence}")
    return outcome


def effects(using: str) -> list[str]:
    return sorted(Effect.objects.using(using).values_list("reference", flat=True))


def test_duplicate(using: str) -> None:
    """A repeated number is a no-op."""
    for number in (0, 1, 1, 0):
        outcome = take(using, 0, number)
    assert outcome == Duplicate(1)
    assert effects(using) == ["0:0", "0:1"]


def test_gap(using: str) -> None:
    """A gap is refused and says what comes next; nothing is lost when that comes."""
    assert take(using, 0, 1) == OutOfOrder(0)
    assert StreamPosition.objects.using(using).count() == 0
    take(using, 0, 0)
    assert take(using, 0, 2) == OutOfOrder(1)
    assert [take(using, 0, number) for number in (1, 2)] == [Accepted(), Accepted()]
    assert effects(using) == ["0:0", "0:1", "0:2"]


def test_outside_a_transaction(using: str) -> None:
    """Outside a transaction it is refused: there is nothing to commit with."""
    with pytest.raises(ImproperlyConfigured, match=r"within one transaction.atomic\(\)"):
        accept(PEER, epoch=0, sequence=0, using=using)
    assert StreamPosition.objects.using(using).count() == 0


@pytest.mark.parametrize("wrong", [-1, 2**63, "1"])
def test_no_number(using: str, wrong: Any) -> None:
    """What a peer may send but no number can be is refused before the database is asked."""
    with transaction.atomic(using=using):
        for numbers in ({"epoch": wrong, "sequence": 0}, {"epoch": 0, "sequence": wrong}):
            with pytest.raises(ValueError, match="must be an integer from 0"):
                accept(PEER, **numbers, using=using)
        assert accept(PEER, epoch=2**63 - 1, sequence=0, using=using) == Accepted()


def test_race(using: str) -> None:
    """Of simultaneous copies of a message one is accepted, also of the very first."""
    for number in range(3):
        outcomes = in_threads([lambda number=number: take(using, 0, number)] * 12)
        assert outcomes.count(Accepted()) == 1
        assert outcomes.count(Duplicate(number)) == 11
    assert effects(using) == ["0:0", "0:1", "0:2"]


REPEATABLE_READ = {
    "postgresql": "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL REPEATABLE READ",
    "mysql": "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ",
}


@pytest.mark.parametrize(("number", "expected"), [(1, Duplicate(1)), (2, Accepted())])
def test_snapshot(using: str, number: int, expected: Any) -> None:
    """A transaction that sees an old row judges by the row as it is, or is refused."""
    connection = connections[using]
    if connection.vendor not in REPEATABLE_READ:
        pytest.skip("SQLite has one writer, which sees all")
    take(using, 0, 0)
    with connection.cursor() as cursor:
        cursor.execute(REPEATABLE_READ[connection.vendor])
    outcome: Any | None = None
    with suppress(OperationalError), transaction.atomic(using=using):
        effects(using)  # the snapshot is taken
        in_threads([lambda: take(using, 0, 1)])
        outcome = accept(PEER, epoch=0, sequence=number, using=using)
    connection.close()
    assert outcome == (None if connection.vendor == "postgresql" else expected)


def judged(messages: list[tuple[int, int]]) -> list[Any]:
    """What the documentation says of messages, without a database."""
    epoch, position, outcomes = -1, -1, list[Any]()
    for number, sequence in messages:
        restarts = number > epoch
        expected = 0 if restarts or epoch < 0 else position + 1
        if number < epoch:
            outcomes.append(Fenced(epoch))
        elif sequence == expected:
            outcomes.append(Accepted())
            epoch, position = number, sequence
        elif sequence < expected:
            outcomes.append(Duplicate(position))
        else:
            outcomes.append(OutOfOrder(expected))
    return outcomes


@pytest.mark.django_db(transaction=False)
def test_any_messages() -> None:
    """Whatever a peer sends, each message is judged as documented, and effects are gapless."""
    messages = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=30)

    @settings(max_examples=100, deadline=None, database=None)
    @given(messages)
    @example([(0, 0), (0, 1), (1, 2), (1, 0), (0, 2), (1, 1)])
    def check(messages: list[tuple[int, int]]) -> None:
        with transaction.atomic():
            outcomes = [take("default", *message) for message in messages]
            transaction.set_rollback(True)
        assert outcomes == judged(messages)

    check()
