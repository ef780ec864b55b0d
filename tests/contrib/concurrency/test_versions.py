"""A write that would overwrite somebody else's is refused, by the UPDATE itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import IntegrityError, connections, models, transaction
from django.db.models import F
from django.db.models.signals import post_save
from django.test.utils import CaptureQueriesContext, isolate_apps

from idempotency_django.contrib.concurrency.errors import ConcurrentModification
from idempotency_django.contrib.concurrency.versions import (
    Versioned,
    VersionField,
    compare_and_swap,
    version_field,
)
from idempotency_django.testing.contract import PATIENCE, in_threads
from tests.contrib.concurrency.models import (
    Base,
    Country,
    Extended,
    Owner,
    SeatTicket,
    Ticket,
    UrgentTicket,
)

pytestmark = [pytest.mark.django_db(transaction=True, databases="__all__"), pytest.mark.driver]


def statements(using: str, function: Callable[[], object]) -> list[str]:
    """What a function sends to the database."""
    with CaptureQueriesContext(connections[using]) as queries:
        function()
    return [query["sql"] for query in queries]


def new(using: str, **fields: Any) -> Ticket:
    return Ticket.objects.using(using).create(**fields)


def row(ticket: models.Model) -> Any:
    """The object as its row is now."""
    return type(ticket)._base_manager.using(ticket._state.db).get(pk=ticket.pk)


class Change(Exception):  # rolls a transaction back
    pass


class TestSave:
    def test_one_statement(self, using: str) -> None:
        """A save is one UPDATE on condition of the version, and counts it."""
        ticket = new(using)
        assert ticket.version == 1

        [update] = statements(using, ticket.save)

        assert update.startswith("UPDATE")
        assert (ticket.version, row(ticket).version) == (2, 2)

    def test_lost_update(self, using: str) -> None:
        """After a rollback, the object does not overwrite another one's change of that version."""
        ticket = new(using)
        with pytest.raises(Change), transaction.atomic(using=using):
            ticket.save()
            raise Change
        row(ticket).save()
        with pytest.raises(ConcurrentModification):
            ticket.save()

    def test_creation(self, using: str) -> None:
        """An object whose creation was rolled back is refused."""
        ticket = Ticket(title="a")
        with pytest.raises(Change), transaction.atomic(using=using):
            ticket.save(using=using)
            raise Change
        with pytest.raises(ConcurrentModification):
            ticket.save(using=using)

    def test_stale(self, using: str) -> None:
        """Of two who loaded the same version, the second one writes nothing and is told why."""
        ticket = new(using, title="mine")
        other = row(ticket)
        other.title = "other"
        other.save()

        with pytest.raises(ConcurrentModification, match=f"The ticket {ticket.pk} .* version 1 "):
            ticket.save()

        assert (row(ticket).title, row(ticket).version, ticket.version) == ("other", 2, 1)

    def test_deleted(self, using: str) -> None:
        """What somebody else deleted is not inserted again."""
        ticket = new(using)
        row(ticket).delete()
        with pytest.raises(ConcurrentModification):
            ticket.save()
        assert not Ticket.objects.using(using).exists()

    def test_update_fields(self, using: str) -> None:
        """A save of some fields asks for the version, and counts it."""
        ticket = new(using, title="a")
        stale = row(ticket)
        ticket.title = "b"
        ticket.save(update_fields=["title"])
        assert (ticket.version, row(ticket).version, row(ticket).title) == (2, 2, "b")
        with pytest.raises(ConcurrentModification):
            stale.save(update_fields=["state"])

    def test_deferred(self, using: str) -> None:
        """An object whose fields are loaded in part is saved in part; the version must be there."""
        ticket = new(using)
        part = Ticket.objects.using(using).only("title", "version").get(pk=ticket.pk)
        part.title = "b"
        part.save()
        assert (row(ticket).title, row(ticket).version) == ("b", 2)
        blind = Ticket.objects.using(using).defer("version").get(pk=ticket.pk)
        with pytest.raises(ValueError, match="without its version"):
            blind.save()
        with pytest.raises(ValueError, match="without its version"):
            blind.delete()
        assert row(ticket).version == 2

    def test_receivers(self, using: str) -> None:
        """Receivers of post_save see the new version; a refused save is not announced."""
        seen: list[int] = []

        def receive(instance: Ticket, **_: Any) -> None:
            seen.append(instance.version)

        ticket = new(using)
        stale = row(ticket)
        post_save.connect(receive, Ticket)
        try:
            ticket.save()
            with pytest.raises(ConcurrentModification):
                stale.save()
        finally:
            post_save.disconnect(receive, Ticket)
        assert seen == [2]

    def test_chosen_primary_key(self, using: str) -> None:
        """An object that was not loaded never overwrites a row."""
        Country(code="DE", name="Germany").save(using=using)
        with pytest.raises(IntegrityError):
            Country(code="DE", name="Deutschland").save(using=using)
        assert Country.objects.using(using).get().name == "Germany"


def test_stale_delete(using: str) -> None:
    """A stale delete is refused, and a transaction around it stays usable; a current one is
    done.
    """
    ticket = new(using)
    row(ticket).save()
    with pytest.raises(ConcurrentModification):
        ticket.delete()
    with transaction.atomic(using=using):
        with pytest.raises(ConcurrentModification):
            ticket.delete()
        assert Ticket.objects.using(using).exists()
    assert row(ticket).version == 2
    assert row(ticket).delete()[0] == 1
    assert not Ticket.objects.using(using).exists()


class TestInheritance:
    @pytest.mark.parametrize("model", [UrgentTicket, Extended])
    def test_stale(self, using: str, model: type[Any]) -> None:
        """With several tables, all of a stale save is refused, whichever has the version."""
        first = model.objects.using(using).create()
        second = row(first)
        name = version_field(model).name
        created = getattr(first, name)
        for field in ("deadline", "title", "note", "name"):
            if hasattr(first, field):
                setattr(first, field, "first")
                setattr(second, field, "second")
        first.save()
        with transaction.atomic(using=using):
            with pytest.raises(ConcurrentModification), transaction.atomic(using=using):
                second.save()
            found = row(first)
        values = {getattr(found, f, "first") for f in ("deadline", "title", "note", "name")}
        assert values == {"first"}
        assert getattr(first, name) == getattr(found, name) == created + 1
        with pytest.raises(ConcurrentModification):
            second.delete()

    def test_swap(self, using: str) -> None:
        """compare_and_swap() changes the table that has the version, and no other."""
        urgent = UrgentTicket.objects.using(using).create()
        with pytest.raises(ValueError, match=r"cannot change 'deadline'.* table of Ticket"):
            compare_and_swap(urgent, title="new", deadline="late")
        compare_and_swap(urgent, title="new")
        assert (row(urgent).title, row(urgent).version, urgent.version) == ("new", 2, 2)


@pytest.mark.parametrize("write", ["save", "delete"])
@pytest.mark.parametrize(
    ("model", "changes"),
    [
        (Ticket, {"title": "new"}),
        (UrgentTicket, {"deadline": "late"}),
        (Extended, {"note": "late", "name": "new"}),
        (SeatTicket, {"row": "late", "title": "new"}),
    ],
)
def test_race(
    using: str, model: type[Any], changes: dict[str, Any], write: str, threads: int
) -> None:
    """Whichever table has the version: of many who read the same one, one writes."""
    Base.objects.using(using).create()  # so that the keys of the tables differ
    first = model.objects.using(using).create(**({"code": "1"} if model is SeatTicket else {}))
    loaded = threading.Barrier(threads, timeout=PATIENCE)

    def change() -> bool:
        mine = row(first)
        loaded.wait()
        try:
            if write == "delete":
                mine.delete()
            else:
                for name, value in changes.items():
                    setattr(mine, name, value)
                mine.save()
        except ConcurrentModification:
            return False
        return True

    assert sum(in_threads([change] * threads)) == 1
    if write == "delete":
        assert not model.objects.using(using).exists()
        return
    version = version_field(model).attname
    assert getattr(row(first), version) - getattr(first, version) == 1
    assert {name: getattr(row(first), name) for name in changes} == changes


class TestCompareAndSwap:
    def test_one_statement(self, using: str) -> None:
        """It is one UPDATE of what is named; the object has the new values."""
        ticket = new(using, title="a", amount=1)
        ticket.title = "not saved"
        [update] = statements(using, lambda: compare_and_swap(ticket, state="paid"))
        assert update.startswith("UPDATE")
        assert (ticket.state, ticket.version) == ("paid", 2)
        assert (row(ticket).state, row(ticket).version, row(ticket).title) == ("paid", 2, "a")

    def test_stale(self, using: str) -> None:
        """Somebody else's change is not overwritten, and the object stays as it was."""
        ticket = new(using)
        row(ticket).save()
        with pytest.raises(ConcurrentModification):
            compare_and_swap(ticket, state="paid")
        assert (ticket.state, ticket.version, row(ticket).state) == ("pending", 1, "pending")

    def test_expression(self, using: str) -> None:
        """The value of an expression is loaded when it is read."""
        ticket = new(using, amount=1)
        compare_and_swap(ticket, amount=F("amount") + 1)
        assert ticket.amount == 2
        ticket.save()

    def test_rollback(self, using: str) -> None:
        """A rollback takes back the version."""
        ticket = new(using)
        with pytest.raises(Change), transaction.atomic(using=using):
            compare_and_swap(ticket, state="paid", amount=F("amount") + 1)
            compare_and_swap(ticket, state="shipped")
            raise Change
        assert ticket.version == 1
        compare_and_swap(ticket, state="paid")

    def test_without_version(self) -> None:
        """A model without a version is refused by name."""

        with pytest.raises(ImproperlyConfigured, match=r"tests.Owner has 0 version fields"):
            compare_and_swap(Owner(pk=1), name="a")


@pytest.fixture
def isolated() -> Iterator[None]:
    with isolate_apps("tests"):
        yield


def test_check_of_field(isolated: None) -> None:
    """A version field in a model that is not Versioned protects nothing: a check says so."""

    class Plain(models.Model):
        version = VersionField()

    assert [error.id for error in Plain.check() if "idempotency" in str(error.id)] == [
        "idempotency_django.E032"
    ]


def test_check_of_model(isolated: None) -> None:
    """A Versioned model without a version field, or with two, is refused by a check."""

    class Without(Versioned, models.Model):
        pass

    class Twice(Versioned, models.Model):
        one = VersionField()
        two = VersionField()

    for model in (Without, Twice):
        assert "idempotency_django.E032" in [error.id for error in model.check()]
    assert Ticket.check() == []
