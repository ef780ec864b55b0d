"""Of many duplicates, one moves the row and runs the effect."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import pytest
from django.db import IntegrityError, models, transaction
from django.db.transaction import TransactionManagementError

from idempotency_django.contrib.concurrency import AlreadyThere, Moved, transition
from idempotency_django.contrib.concurrency.errors import IllegalTransition
from idempotency_django.contrib.concurrency.versions import version_field
from idempotency_django.testing.contract import PATIENCE, in_threads
from tests.contrib.concurrency.models import (
    Base,
    Extended,
    Owner,
    Payment,
    SeatTicket,
    Ticket,
    UrgentProxy,
    UrgentTicket,
)

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")


def row(obj: models.Model) -> Any:
    return type(obj)._base_manager.using(obj._state.db).get(pk=obj.pk)


def effects(using: str) -> int:
    return Owner.objects.using(using).count()


def ship(ticket: Ticket) -> str:
    """An effect in the same database."""
    Owner.objects.using(ticket._state.db).create(name=None)
    return f"shipped {ticket.pk}"


def fail(ticket: Ticket) -> None:
    ship(ticket)
    raise LookupError


def swallow(ticket: Ticket) -> None:
    """Catches an error of the database, which has marked the transaction by then."""
    for _ in range(2):
        with suppress(IntegrityError):
            Owner.objects.using(ticket._state.db).create(name="twice")


def mark(ticket: Ticket) -> None:
    ship(ticket)
    transaction.set_rollback(True, using=ticket._state.db)


@pytest.fixture
def ticket(using: str) -> Ticket:
    return Ticket.objects.using(using).create(title="a")


class TestTransition:
    def test_moved(self, ticket: Ticket) -> None:
        """The row and the object are moved, and the effect's result is there."""
        outcome = transition(ticket, "pending", "paid", effect=ship)
        assert outcome == Moved(ticket, "paid", f"shipped {ticket.pk}")
        assert (ticket.state, ticket.version) == ("paid", 2)
        assert (row(ticket).state, row(ticket).version) == ("paid", 2)
        assert effects(ticket._state.db) == 1

    def test_duplicate(self, ticket: Ticket) -> None:
        """A duplicate does nothing, and says so; also one that was loaded before."""
        stale = row(ticket)
        transition(ticket, "pending", "paid", effect=ship)
        for obj in (ticket, stale):
            assert transition(obj, "pending", "paid", effect=ship) == AlreadyThere(obj, "paid")
            assert obj.state == "paid"
        assert effects(ticket._state.db) == 1

    def test_illegal(self, ticket: Ticket) -> None:
        """From another state it is refused, naming both; the object stays as it was."""
        with pytest.raises(
            IllegalTransition, match=r"state 'pending'.*has no transition to 'shipped'"
        ):
            transition(ticket, ["paid", "packed"], "shipped", effect=ship)
        assert (ticket.state, effects(ticket._state.db)) == ("pending", 0)

    def test_effect_fails(self, ticket: Ticket) -> None:
        """An effect that fails leaves row and object as before, also in a transaction that goes on;
        a retry runs it.
        """
        with transaction.atomic(using=ticket._state.db), pytest.raises(LookupError):
            transition(ticket, "pending", "paid", effect=fail)
        assert (ticket.state, row(ticket).state, ticket.version) == ("pending", "pending", 1)
        assert effects(ticket._state.db) == 0
        assert isinstance(transition(ticket, "pending", "paid", effect=ship), Moved)

    @pytest.mark.parametrize("effect", [swallow, mark])
    def test_marked(self, ticket: Ticket, effect: Any) -> None:
        """An effect that has its transaction rolled back without an error has moved nothing."""
        with pytest.raises(TransactionManagementError, match="marked for rollback"):
            transition(ticket, "pending", "paid", effect=effect)
        assert (ticket.state, row(ticket).state, ticket.version) == ("pending", "pending", 1)
        assert effects(ticket._state.db) == 0
        assert isinstance(transition(ticket, "pending", "paid", effect=ship), Moved)

    def test_null(self, using: str) -> None:
        """A row without a state moves, if that is among the sources."""
        one, two = (Payment.objects.using(using).create(order=order) for order in (1, 2))
        assert transition(one, None, "x", field="receipt") == Moved(one, "x")
        assert transition(one, None, "x", field="receipt") == AlreadyThere(one, "x")
        assert transition(two, ["y", None], "z", field="receipt") == Moved(two, "z")
        assert transition(two, ["y", "z"], None, field="receipt") == Moved(two, None)
        with pytest.raises(IllegalTransition):
            transition(two, ["x", "y"], "z", field="receipt")

    def test_rollback(self, ticket: Ticket) -> None:
        """A rollback of the caller's transaction takes back the object's state, too."""
        with transaction.atomic(using=ticket._state.db):
            transition(ticket, "pending", "paid")
            transition(ticket, "paid", "shipped")
            transaction.set_rollback(True, using=ticket._state.db)
        assert (ticket.state, ticket.version, row(ticket).state) == ("pending", 1, "pending")

    def test_stale_object(self, ticket: Ticket) -> None:
        """The effect sees the row as it is: saving the object loses nobody's change."""
        stale, other = row(ticket), row(ticket)
        other.title = "other"
        other.save()
        transition(ticket, "pending", "paid", effect=lambda obj: obj.save())
        transition(stale, "pending", "paid")
        for obj in (ticket, stale, row(ticket)):
            assert (obj.title, obj.state, obj.version) == ("other", "paid", 4)

    def test_missing(self, ticket: Ticket) -> None:
        """A row that is gone is the model's own error."""
        Ticket.objects.using(ticket._state.db).all().delete()
        with pytest.raises(Ticket.DoesNotExist):
            transition(ticket, "pending", "paid")

    def test_loop(self, ticket: Ticket) -> None:
        """A transition to where it starts could not tell a duplicate."""
        with pytest.raises(ValueError, match="cannot also start from"):
            transition(ticket, ["pending", "paid"], "paid")


def inheriting(model: type[Any], using: str) -> Any:
    """A saved object whose primary keys in its tables differ, where they can."""
    Base.objects.using(using).create()
    return model.objects.using(using).create(**({"code": "12A"} if model is SeatTicket else {}))


@pytest.mark.parametrize("loaded", ["whole", "deferred"])
@pytest.mark.parametrize(
    ("model", "field"),
    [
        (Ticket, "state"),
        (UrgentProxy, "state"),
        (SeatTicket, "row"),
        (Extended, "name"),
    ],
)
def test_race(using: str, model: type[Any], field: str, loaded: str, threads: int) -> None:
    """Whichever table has the state and the version: of many at once, one moves."""
    obj = inheriting(model, using)
    source, rows = getattr(obj, field), model.objects.using(using)
    rows = rows.only("pk") if loaded == "deferred" else rows
    start = threading.Barrier(threads, timeout=PATIENCE)

    def contend() -> type:
        mine = rows.get(pk=obj.pk)
        start.wait()
        return type(transition(mine, source, "new", field=field, effect=ship))

    outcomes = in_threads([contend] * threads)
    assert (outcomes.count(Moved), outcomes.count(AlreadyThere)) == (1, threads - 1)
    assert effects(using) == 1
    assert getattr(row(obj), field) == "new"
    version = version_field(model).attname
    assert getattr(row(obj), version) - getattr(obj, version) == 1


def test_child_is_gone(using: str) -> None:
    """Where the child's row is gone and the parent's stays, nothing is moved."""
    urgent = inheriting(UrgentTicket, using)
    row(urgent).delete(keep_parents=True)
    with pytest.raises(UrgentTicket.DoesNotExist):
        transition(urgent, "pending", "paid", effect=ship)
    assert (Ticket.objects.using(using).get().state, effects(using)) == ("pending", 0)
