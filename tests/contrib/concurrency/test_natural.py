"""The row itself says whether something was done."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import IntegrityError, connections, models, transaction
from django.db.transaction import TransactionManagementError
from django.test.utils import CaptureQueriesContext, isolate_apps

from idempotency_django.contrib.concurrency import ensure, once_per
from idempotency_django.contrib.concurrency.natural import compared
from idempotency_django.errors import (
    FingerprintMismatch,
    OperationInProgress,
    ResponseNotStored,
)
from idempotency_django.models import IdempotencyKey
from idempotency_django.policy import Policy
from idempotency_django.testing.contract import PATIENCE, in_threads
from tests.contrib.concurrency.models import CardPayment, Owner, Payment, Seat, Ticket, WindowSeat

pytestmark = [pytest.mark.django_db(transaction=True, databases="__all__"), pytest.mark.driver]
THREADS = 30


class TestEnsure:
    def test_new(self, using: str) -> None:
        """A new row is one statement, by save()."""
        with CaptureQueriesContext(connections[using]) as queries:
            payment, created = ensure(Payment, {"amount": 5}, using, order=17)
        assert created
        assert len(queries) == 1
        assert (payment.saves, payment.amount, payment._state.db) == (1, 5, using)
        assert Payment.objects.using(using).get().order == 17

    def test_there(self, using: str) -> None:
        """What is there is found, whatever the defaults are."""
        first, _ = ensure(Payment, {"amount": 5}, using, order=17)
        second, created = ensure(Payment, {"amount": lambda: 6}, using, order=17)
        assert (second.pk, second.amount, created) == (first.pk, 5, False)

    def test_within_a_transaction(self, using: str) -> None:
        """A transaction in which the row is found goes on."""
        ensure(Payment, None, using, order=17)
        with transaction.atomic(using=using):
            assert not ensure(Payment, None, using, order=17)[1]
            with CaptureQueriesContext(connections[using]) as queries:
                assert ensure(Payment, {"amount": lambda: 3}, using, order=18)[1]
        assert [q["sql"].split()[0] for q in queries] == ["SAVEPOINT", "INSERT", "RELEASE"]
        assert Payment.objects.using(using).count() == 2

    def test_another_constraint(self, using: str) -> None:
        """The error of another constraint is raised."""
        ensure(Payment, {"receipt": "r"}, using, order=17)
        with pytest.raises(IntegrityError):
            ensure(Payment, {"receipt": "r"}, using, order=18)
        with transaction.atomic(using=using):
            with pytest.raises(IntegrityError):
                ensure(Payment, {"receipt": "r"}, using, order=18)
            assert Payment.objects.using(using).count() == 1

    def test_related(self, using: str) -> None:
        """A constraint over several fields, one of them a related object or its primary key."""
        owner = Owner.objects.using(using).create(name="a")
        first, _ = ensure(Payment, {"order": 1}, using, owner=owner, amount=5)
        second, created = ensure(Payment, {"order": 2}, using, owner_id=owner.pk, amount=5)
        assert (first.pk, created) == (second.pk, False)

    @pytest.mark.parametrize(
        "lookup", [{"owner": None}, {"amount": 5}, {"order": 1, "amount": 5}, {"order__gt": 1}]
    )
    def test_without_constraint(self, lookup: dict[str, Any]) -> None:
        """Without an unconditional constraint over exactly the fields, it is refused."""
        with pytest.raises(ImproperlyConfigured, match=r"tests\.Payment has no|own fields"):
            ensure(Payment, None, None, **lookup)
        assert not Payment.objects.exists()

    def test_null(self) -> None:
        """A NULL is equal to no other, so it identifies no row."""
        with pytest.raises(ValueError, match="owner is None"):
            ensure(Payment, {"order": 1}, owner=None, amount=5)

    @pytest.mark.parametrize(
        ("model", "lookup"),
        [(Payment, {"order": 17}), (CardPayment, {"order": 17}), (WindowSeat, {"code": "12A"})],
    )
    def test_race(self, using: str, model: type[Any], lookup: dict[str, Any]) -> None:
        """Of thirty at once, one creates the row and all get it; its parent may have the key."""
        results = in_threads([lambda: ensure(model, None, using, **lookup)] * THREADS)
        assert sum(created for _, created in results) == 1
        assert len({obj.pk for obj, _ in results}) == model.objects.using(using).count() == 1

    def test_parent_is_there(self, using: str) -> None:
        """A parent's row that is there without the child's is not overwritten."""
        Seat.objects.using(using).create(code="12A", row="mine")
        with pytest.raises(IntegrityError):
            ensure(WindowSeat, {"row": "his"}, using, code="12A")
        assert Seat.objects.using(using).get().row == "mine"
        assert not WindowSeat.objects.using(using).exists()


def test_constraints() -> None:
    """Each way of declaring a constraint counts, if it is checked at once and for all rows."""
    with isolate_apps("tests"):

        class Parent(models.Model):  # noqa: DJ008
            a = models.IntegerField()
            b = models.IntegerField()

            class Meta:
                unique_together = [("a", "b")]

        class Child(Parent):  # noqa: DJ008
            c = models.IntegerField(null=True)
            d = models.IntegerField()
            e = models.IntegerField()

            class Meta:
                constraints = [
                    models.UniqueConstraint(
                        fields=["d"], name="later", deferrable=models.Deferrable.DEFERRED
                    ),
                    models.UniqueConstraint(fields=["c"], name="nulls", nulls_distinct=False),
                    models.UniqueConstraint(models.F("e"), name="expression"),
                    models.CheckConstraint(condition=models.Q(e=1), name="check"),
                ]

    assert compared(Child, {"a": 1, "b": 2}) is False
    assert compared(Child, ["id"]) is False
    assert compared(Child, ["c"]) is True
    for unfit in ("d", "e", "a"):
        with pytest.raises(ImproperlyConfigured):
            compared(Child, [unfit])


class Calls:
    """What the decorated function below did."""

    count = 0


@once_per("order", model=Payment)
def pay(order: int, amount: int, note: str = "") -> Payment:
    """Make a payment, and something else."""
    Calls.count += 1
    Owner.objects.create(name=f"{order} {amount}")
    return Payment.objects.create(order=order, amount=amount)


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    Calls.count = 0


class TestOncePer:
    def test_replay(self) -> None:
        """The second call gets the row of the first one; nothing is run."""
        first, second = pay(17, 500), pay("17", amount=500)
        assert (first.pk, first.amount) == (second.pk, 500)
        assert (Calls.count, Payment.objects.count(), Owner.objects.count()) == (1, 1, 1)

    def test_permanent(self) -> None:
        """The record never expires, and can be read by people."""
        pay(17, 500)
        record = IdempotencyKey.objects.get()
        assert (record.expires_at, record.key) == (None, "order=17")

    def test_mismatch(self) -> None:
        """The same order with another amount is refused, by the record and by the row alone."""
        pay(17, 500)
        for _ in range(2):
            with pytest.raises(FingerprintMismatch, match="payment with order=17 already exists"):
                pay(17, 501)
            IdempotencyKey.objects.all().delete()
        assert (Calls.count, Payment.objects.get().amount) == (1, 500)

    def test_row_is_the_result(self) -> None:
        """Without a record, the row is the result; what is no field of it is not compared."""
        first = pay(17, 500)
        IdempotencyKey.objects.all().delete()
        assert pay(17, 500, note="another").pk == first.pk
        assert Calls.count == 1

    def test_row_made_elsewhere(self) -> None:
        """A row that something else made is the result just as well."""
        made = Payment.objects.create(order=17, amount=500)
        assert pay(17, 500).pk == made.pk
        assert Calls.count == 0

    def test_somebody_was_faster(self) -> None:
        """A row made while the function runs is the result; the function's work is undone."""

        @once_per("order", model=Payment)
        def slow(order: int, amount: int) -> Payment:
            Owner.objects.create(name="slow")
            if connections["default"].vendor == "sqlite":
                Payment.objects.create(order=order, amount=amount)
            else:
                in_threads([lambda: Payment.objects.create(order=order, amount=amount)])
            return Payment.objects.create(order=order, amount=amount)

        if connections["default"].vendor == "sqlite":
            with pytest.raises(IntegrityError):  # nobody else can write: both were its own
                slow(17, 500)
            assert not Payment.objects.exists()
        else:
            assert slow(17, 500).pk == Payment.objects.get().pk
        assert not Owner.objects.exists()

    def test_another_constraint(self) -> None:
        """The error of another constraint is raised, all is rolled back, and a retry runs."""
        Owner.objects.create(name="17 500")
        with pytest.raises(IntegrityError):
            pay(17, 500)
        assert not Payment.objects.exists()
        Owner.objects.all().delete()
        pay(17, 500)
        assert Calls.count == 2

    def test_within_a_transaction(self) -> None:
        """A transaction around calls of every kind goes on, and rolls them back as a whole."""
        Payment.objects.create(order=1, amount=1)
        Owner.objects.create(name="3 1")
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            assert pay(1, 1).order == 1
            assert pay(2, 1).order == 2
            with pytest.raises(IntegrityError):
                pay(3, 1)
            assert Payment.objects.count() == 2
            raise ZeroDivisionError
        assert Payment.objects.count() == 1
        pay(2, 1)
        assert Payment.objects.count() == 2

    def test_deleted_row(self) -> None:
        """A deleted row frees nothing while its record is there; then it can be made again."""
        pay(17, 500).delete()
        with pytest.raises(
            ResponseNotStored, match=r"was created and deleted before.*use another natural key"
        ):
            pay(17, 500)
        IdempotencyKey.objects.all().delete()
        Owner.objects.all().delete()
        pay(17, 500)
        assert Calls.count == 2

    def test_leased(self) -> None:
        """In the leased mode, the function has a transaction of its own."""

        @once_per("order", model=Payment, policy=Policy(mode="leased"))
        def pay_leased(order: int, amount: int) -> Payment:
            Owner.objects.create(name=f"{order}")
            return Payment.objects.create(order=order, amount=amount, receipt="r")

        assert pay_leased(17, 5).pk == pay_leased(17, 5).pk
        with pytest.raises(FingerprintMismatch):
            pay_leased(17, 6)
        with pytest.raises(IntegrityError):  # the same receipt
            pay_leased(18, 5)
        assert (Payment.objects.count(), Owner.objects.count()) == (1, 1)
        IdempotencyKey.objects.all().delete()
        assert pay_leased(17, 5).order == 17

    def test_marked(self) -> None:
        """A row that is rolled back without an error is not reported, and can be made later."""
        fails = [True, False]

        @once_per("order", model=Payment, policy=Policy(mode="leased"))
        def pay_leased(order: int) -> Payment:
            payment = Payment.objects.create(order=order)
            transaction.set_rollback(fails.pop(0))
            return payment

        with pytest.raises(TransactionManagementError, match="pay_leased ended without an error"):
            pay_leased(17)
        assert pay_leased(17) == Payment.objects.get()

    def test_result(self) -> None:
        """The result is made of the row, the first time and later."""

        @once_per("order", model=Payment, result=lambda row: {"paid": row.amount})
        def pay_it(order: int, amount: int) -> None:
            Payment.objects.create(order=order, amount=amount)

        assert [pay_it(17, 500) for _ in range(2)] == [{"paid": 500}] * 2
        IdempotencyKey.objects.all().delete()
        assert pay_it(17, 500) == {"paid": 500}

    def test_related(self) -> None:
        """A related object is the natural key as well as its number; a long key is a digest."""

        @once_per("owner", "amount", model=Payment)
        def pay_owner(owner: Owner, amount: int) -> Payment:
            return Payment.objects.create(owner=owner, amount=amount, order=1)

        @once_per("name", model=Owner)
        def enrol(name: str) -> Owner:
            return Owner.objects.create(name=name)

        owner = enrol("é" * 90)
        assert enrol("é" * 90).pk == owner.pk
        assert pay_owner(owner, 5).pk == pay_owner(owner, 5).pk
        keys = IdempotencyKey.objects.order_by("pk").values_list("key", flat=True)
        assert [len(keys[0]), keys[1]] == [64, f"owner={owner.pk};amount=5"]

    @pytest.mark.parametrize("made", [None, 18])
    def test_no_such_row(self, made: int | None) -> None:
        """A function that does not make the row is rolled back and refused."""

        @once_per("order", model=Payment)
        def broken(order: int) -> Payment | None:
            Owner.objects.create(name="a")
            return Payment.objects.create(order=made) if made else None

        with pytest.raises(RuntimeError, match="created no payment with order=17"):
            broken(17)
        assert not Owner.objects.exists()
        assert not Payment.objects.exists()

    def test_null(self) -> None:
        """No value is no natural key."""
        with pytest.raises(ValueError, match="order is None"):
            pay(None, 500)

    def test_declaration(self) -> None:
        """What can protect nothing is refused where it is written."""
        with pytest.raises(ImproperlyConfigured, match="no unique constraint"):
            once_per("amount", model=Payment)
        with pytest.raises(ImproperlyConfigured, match="no unique constraint"):
            once_per("title", model=Ticket)
        with pytest.raises(ImproperlyConfigured, match="no parameter 'order'"):
            once_per("order", model=Payment)(lambda amount: None)

        async def asynchronous(order: int) -> None:
            pass

        with pytest.raises(ImproperlyConfigured, match="it is async"):
            once_per("order", model=Payment)(asynchronous)

    @pytest.mark.parametrize("model", [Payment, CardPayment])
    def test_race(self, model: type[Payment]) -> None:
        """Of thirty at once one makes the row; the others get it, or are told to come again."""
        first = threading.Event()

        @once_per("order", model=model)
        def slow(order: int) -> Payment:
            Owner.objects.create(name="a")
            first.wait(PATIENCE if connections["default"].vendor != "sqlite" else 0)
            return model.objects.create(order=order)

        refused = threading.Semaphore(0)

        def contend() -> object:
            try:
                return slow(17).pk
            except OperationInProgress:
                refused.release()
                return None

        def finish() -> None:
            for _ in range(THREADS - 1 if connections["default"].vendor != "sqlite" else 0):
                assert refused.acquire(timeout=PATIENCE)
            first.set()

        results = in_threads([finish, *[contend] * THREADS])[1:]
        assert len({pk for pk in results if pk}) == 1
        assert (Payment.objects.count(), Owner.objects.count()) == (1, 1)
        assert slow(17).pk == Payment.objects.get().pk
