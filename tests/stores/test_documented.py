"""What the documentation says of databases, and no other test would contradict."""

from __future__ import annotations

import pytest
from django.conf import settings
from django.db import connection, transaction

from idempotency_django.engine import Result, reraise, run
from idempotency_django.errors import OperationInProgress
from idempotency_django.stores.database import DatabaseStore
from idempotency_django.stores.records import Claim, Operation, Record, Status
from idempotency_django.testing import RESPONSE, an_operation, in_threads
from tests.models import Effect


@pytest.mark.django_db(transaction=True, databases="__all__")
@pytest.mark.parametrize("database", ["postgres", "mariadb", "sqlite"])
@pytest.mark.parametrize("part", ["key", "scope"])
def test_upper_case_counts(database: str, part: str) -> None:
    """``user:Bob`` and ``user:bob`` are two users, and two keys, on every database."""
    if database not in settings.ALIASES:
        pytest.skip(f"NO {database} HERE")
    store = DatabaseStore("default", using=settings.ALIASES[database])
    for name in ("user:Bob", "user:bob"):
        with transaction.atomic(using=store.using):
            claim = store.acquire(an_operation(**{"key": "k", "scope": "s", part: name}))
            assert isinstance(claim, Claim), name
            assert store.complete(claim, RESPONSE)


def stored() -> Operation:
    """An operation that another connection has executed and completed."""
    operation = an_operation(count_replays=False)

    def execute() -> None:
        store = DatabaseStore("default")
        with transaction.atomic():
            claim = store.acquire(operation)
            assert isinstance(claim, Claim)
            store.complete(claim, RESPONSE)

    in_threads([execute])
    return operation


@pytest.mark.postgres
@pytest.mark.skipif("connection.vendor != 'postgresql'", reason="needs PostgreSQL")
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("last", [True, False])
def test_record_that_a_snapshot_does_not_show(level: str, last: bool) -> None:
    """A transaction that has read before the first request committed does not see its record.

    It runs, cannot store its response, and is told "in progress": it has rolled back. The next
    transaction finds the response.
    """
    store = DatabaseStore("default")
    with pytest.raises(OperationInProgress, match="has rolled back"), store.transaction():
        with connection.cursor() as cursor:
            cursor.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
        assert Effect.objects.count() == 0  # from here on it sees what was committed before
        operation = stored()
        claim = store.acquire(operation)
        assert isinstance(claim, Claim)
        Effect.objects.create(reference="a")
        store.complete(claim, RESPONSE, last=last)
    assert Effect.objects.count() == 0
    with transaction.atomic():
        found = store.acquire(operation)
    assert isinstance(found, Record)
    assert found.status is Status.COMPLETED


@pytest.mark.postgres
@pytest.mark.skipif("connection.vendor != 'postgresql'", reason="needs PostgreSQL")
@pytest.mark.django_db(transaction=True)
def test_state_of_what_a_snapshot_does_not_show() -> None:
    """Nobody is told that nothing was executed: another request has executed it."""

    def effect(_: object) -> Result:
        Effect.objects.create(reference="a")
        return Result("response", RESPONSE)

    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        assert Effect.objects.count() == 0
        operation = stored()
        with pytest.raises(OperationInProgress) as refused:
            run(DatabaseStore("default"), operation, effect, reraise)
    assert refused.value.state == "in-progress"
