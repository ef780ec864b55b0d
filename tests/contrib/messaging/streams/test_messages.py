"""How many messages a message of a stream sends to PostgreSQL, counted from libpq's trace."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest
from django.db import connection, transaction

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
