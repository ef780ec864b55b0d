"""A stream has one owner, and the effects of each offset commit once, with its position."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, connections, transaction
from django.db.models import F
from django.db.transaction import TransactionManagementError

from idempotency_django.contrib.messaging import claim_stream
from idempotency_django.contrib.messaging.errors import AlreadyProcessed, StreamFenced
from idempotency_django.contrib.messaging.models import StreamPosition
from idempotency_django.contrib.messaging.streams import Stream
from idempotency_django.testing.contract import in_threads
from tests.models import Effect
from tests.stores.test_round_trips import messages

pytestmark = [pytest.mark.django_db(transaction=True, databases="__all__"), pytest.mark.driver]

NAME = "billing/orders/0"


def book(using: str, offset: int) -> None:
    Effect.objects.using(using).create(reference=str(offset))


def booked(using: str) -> list[int]:
    """The offsets that had an effect, in order."""
    rows = Effect.objects.using(using).values_list("reference", flat=True)
    return sorted(map(int, rows))


def process(stream: Stream, using: str, *offsets: int) -> None:
    for offset in offsets:
        with stream.advance(to=offset):
            book(using, offset)


def kept(using: str) -> tuple[int, int]:
    """Epoch and position in the table."""
    return StreamPosition.objects.using(using).values_list("epoch", "position").get()


class TestClaim:
    def test_next(self, using: str) -> None:
        """The next owner goes on where the last one has committed."""
        process(claim_stream(NAME, using=using), using, 0, 1, 5)
        stream = claim_stream(NAME, using=using)
        assert (stream.epoch, stream.position) == (2, 5)
        assert not stream.is_new(5)
        assert stream.is_new(6)

    def test_race(self, using: str) -> None:
        """Of many that claim at once, each gets an epoch of its own, also the first time."""
        claimed = in_threads([lambda: claim_stream(NAME, using=using).epoch] * 20)
        assert sorted(claimed) == [*range(1, 21)]

    def test_within_a_transaction(self, using: str) -> None:
        """Within a transaction it is refused: the owner before would be fenced only later."""
        with (
            transaction.atomic(using=using),
            pytest.raises(ImproperlyConfigured, match=f"stream '{NAME}' must commit on its own"),
        ):
            claim_stream(NAME, using=using)


class TestAdvance:
    def test_reset_to_earliest(self, using: str) -> None:
        """If everything is delivered again, nothing has a second effect."""
        stream = claim_stream(NAME, using=using)
        for _ in range(2):
            for offset in range(5):
                if stream.is_new(offset):
                    process(stream, using, offset)
        assert booked(using) == [*range(5)]

    @pytest.mark.parametrize("offset", [0, 2])
    def test_processed(self, using: str, offset: int) -> None:
        """An offset that is processed raises, and its block does not run."""
        stream = claim_stream(NAME, using=using)
        process(stream, using, 2)
        processed = pytest.raises(AlreadyProcessed, match=f"offset {offset} of .* position is 2")
        with processed, stream.advance(to=offset):
            pytest.fail("The block runs.")
        assert booked(using) == [2]

    def test_unconfirmed(self, using: str) -> None:
        """A commit that was not confirmed is found out with the next delivery."""
        stream = claim_stream(NAME, using=using)
        process(Stream(NAME, using, stream.epoch, -1), using, 4)  # which stands for one
        with pytest.raises(AlreadyProcessed):
            process(stream, using, 3)
        assert not stream.is_new(4)
        assert booked(using) == [4]

    def test_fenced(self, using: str) -> None:
        """After another claim, the owner before commits nothing, and its block does not run."""
        late = claim_stream(NAME, using=using)
        process(late, using, 0)
        owner = claim_stream(NAME, using=using)
        with pytest.raises(StreamFenced, match="as epoch 1"), late.advance(to=1):
            pytest.fail("The block runs.")
        process(owner, using, 1, 2)
        with pytest.raises(StreamFenced):  # also where it is processed by now
            process(late, using, 2)
        assert booked(using) == [0, 1, 2]
        StreamPosition.objects.using(using).all().delete()  # then nobody owns it
        with pytest.raises(StreamFenced):
            process(owner, using, 3)

    def test_failure(self, using: str) -> None:
        """If the block raises, effects and position are rolled back, and a retry has them."""
        stream = claim_stream(NAME, using=using)
        with pytest.raises(LookupError), stream.advance(to=7):
            book(using, 7)
            raise LookupError
        assert (booked(using), stream.position, kept(using)) == ([], -1, (1, -1))
        process(stream, using, 7)
        assert booked(using) == [7]

    def test_marked(self, using: str) -> None:
        """A block whose transaction Django rolls back without a word is no success."""
        stream = claim_stream(NAME, using=using)
        with (
            pytest.raises(TransactionManagementError, match="marked for rollback"),
            stream.advance(to=7),
        ):
            book(using, 7)
            transaction.set_rollback(True, using=using)
        assert (booked(using), stream.position, kept(using)) == ([], -1, (1, -1))

    @pytest.mark.parametrize("offset", [-1, 2**63, "3"])
    def test_no_offset(self, using: str, offset: Any) -> None:
        """What cannot be an offset is refused before the database is asked."""
        stream = claim_stream(NAME, using=using)
        with pytest.raises(ValueError, match="is not a valid offset"):
            process(stream, using, offset)
        process(stream, using, 2**63 - 1)


def test_within_a_transaction(using: str) -> None:
    """Within a transaction it is refused: the position would be known before it is committed."""
    stream = claim_stream(NAME, using=using)
    with (
        transaction.atomic(using=using),
        pytest.raises(ImproperlyConfigured, match="'billing/orders/0' to 5 must commit on its own"),
    ):
        process(stream, using, 5)
    assert (booked(using), stream.position) == ([], -1)


def test_nobody_claims_meanwhile(using: str) -> None:
    """A claim waits for the message of the owner before, and goes on after it."""
    stream = claim_stream(NAME, using=using)

    def claim() -> int:
        try:
            return claim_stream(NAME, using=using).position
        finally:
            connections.close_all()

    with ThreadPoolExecutor(1) as pool:
        with stream.advance(to=1):
            claimed = pool.submit(claim)
            book(using, 1)
        assert claimed.result(60) == 1
    assert booked(using) == [1]


def test_set_by_hand(using: str) -> None:
    """The owner is fenced; who claims next goes on after the new position."""
    late = claim_stream(NAME, using=using)
    process(late, using, 5)
    rows = StreamPosition.objects.using(using).filter(stream=NAME)
    rows.update(epoch=F("epoch") + 1, position=2)
    with pytest.raises(StreamFenced):
        process(late, using, 10)
    stream = claim_stream(NAME, using=using)
    assert (stream.epoch, stream.position) == (3, 2)


def take(using: str, number: int) -> None:
    """Receive a message whose sender counts, as the documentation has it."""
    stream = claim_stream("peer/7", using=using)
    if number == stream.position + 1:
        with stream.advance(to=number):
            book(using, number)


def test_numbers_of_a_sender(using: str) -> None:
    """Of simultaneous copies of a message one has an effect, and none is left out."""

    def deliver(number: int) -> None:
        with suppress(StreamFenced, AlreadyProcessed):
            take(using, number)

    for number in range(3):
        deliver(number + 1)
        in_threads([lambda number=number: deliver(number)] * 12)
        assert booked(using) == [*range(number + 1)]


on_libpq = pytest.mark.skipif(
    connection.vendor != "postgresql" or not hasattr(connection.Database, "ClientCursor"),
    reason="messages are counted from the trace of libpq, by psycopg 3",
)


def sent(function: Callable[[], None]) -> int:
    """How many messages a call sends."""
    with messages() as lines:
        function()
    return len(lines)


def bare() -> None:
    """A transaction with one effect."""
    with transaction.atomic():
        Effect.objects.create(reference="a")


@on_libpq
def test_messages_of_advance() -> None:
    """A message of a stream sends no more than the bare transaction: its UPDATE goes with BEGIN."""
    stream = claim_stream("a")

    def advance() -> None:
        with stream.advance(to=stream.position + 1):
            Effect.objects.create(reference="a")

    assert sent(advance) == sent(bare)
