"""How many messages a message of a stream sends to PostgreSQL, counted from libpq's trace."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest
from django.db import OperationalError, connection, transaction
from django.test import override_settings

from idempotency_django.contrib.messaging import accept, claim_stream
from tests.models import Effect
from tests.stores.test_round_trips import messages

pytestmark = [
    pytest.mark.skipif(connection.vendor != "postgresql", reason="needs PostgreSQL"),
    pytest.mark.skipif(not hasattr(connection.Database, "ClientCursor"), reason="needs psycopg 3"),
    pytest.mark.django_db(transaction=True),
]


def sent(function: Callable[[], None]) -> int:
    """How many messages a call sends."""
    with messages() as lines:
        function()
    return len(lines)


def bare() -> None:
    """A transaction with one effect."""
    with transaction.atomic():
        Effect.objects.create(reference="a")


def test_advance() -> None:
    """A message of a stream sends no more than the bare transaction: its UPDATE goes with BEGIN."""
    stream = claim_stream("a")

    def advance() -> None:
        with stream.advance(to=stream.position + 1):
            Effect.objects.create(reference="a")

    assert sent(advance) == sent(bare)


def test_accept() -> None:
    """So does a message of a peer."""
    numbers = count()

    def take() -> None:
        with transaction.atomic():
            accept("a", epoch=0, sequence=next(numbers))
            Effect.objects.create(reference="a")

    take()
    assert sent(take) == sent(bare)


def test_switched_off() -> None:
    """Where a store on the database does without that, each statement is sent by itself."""
    backend = "idempotency_django.stores.database.DatabaseStore"
    store = {"BACKEND": backend, "OPTIONS": {"combine_statements": False}}
    with override_settings(IDEMPOTENCY={"STORES": {"default": store}}):
        stream = claim_stream("a")

        def advance() -> None:
            with stream.advance(to=stream.position + 1):
                Effect.objects.create(reference="a")

        assert sent(advance) == sent(bare) + 1


def test_not_the_first() -> None:
    """After another statement of the transaction, it is a message of its own."""
    numbers = count()

    def take() -> None:
        with transaction.atomic():
            Effect.objects.create(reference="a")
            accept("a", epoch=0, sequence=next(numbers))

    take()
    assert sent(take) == sent(bare) + 1


def test_refused() -> None:
    """If the server refuses the UPDATE, its transaction has ended, and the next one is as usual."""
    stream, other = claim_stream("a"), connection.copy()
    with connection.cursor() as cursor:
        cursor.execute("SET lock_timeout = '50ms'")
    try:
        other.set_autocommit(False)
        with other.cursor() as cursor:
            cursor.execute("SELECT * FROM idempotency_messaging_streamposition FOR UPDATE")
        with pytest.raises(OperationalError), stream.advance(to=0):
            pytest.fail("The block runs.")
    finally:
        other.close()
    assert connection.get_autocommit()
    with stream.advance(to=0):
        Effect.objects.create(reference="a")
    assert (Effect.objects.count(), claim_stream("a").position) == (1, 0)
