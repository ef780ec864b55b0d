"""The row itself says whether something was done."""

from __future__ import annotations

import threading

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import IntegrityError, connections, models, transaction
from django.db.transaction import TransactionManagementError
from django.test.utils import isolate_apps

from idempotency_django.contrib.concurrency import once_per
from idempotency_django.errors import FingerprintMismatch, OperationInProgress, ResponseNotStored
from idempotency_django.models import IdempotencyKey
from idempotency_django.policy import Policy
from idempotency_django.testing.contract import PATIENCE, in_threads
from tests.contrib.concurrency.models import Owner, Payment

pytestmark = [pytest.mark.django_db(transaction=True, databases="__all__"), pytest.mark.driver]
THREADS = 30


def test_constraints() -> None:
    """A constraint counts if it is of the very fields, and for all rows."""
    with isolate_apps("tests"):

        class Keyed(models.Model):
            a = models.IntegerField()
            b = models.IntegerField()
            c = models.IntegerField()

            class Meta:
                constraints = [
                    models.UniqueConstraint(fields=["a", "b"], name="two"),
                    models.UniqueConstraint(
                        fields=["c"], condition=models.Q(a=1), name="sometimes"
                    ),
                    models.UniqueConstraint(models.F("b"), name="expression"),
                ]

    for fit in (["a", "b"], ["b", "a"], ["id"]):
        once_per(*fit, model=Keyed)
    for unfit in ("a", "b", "c"):
        with pytest.raises(ImproperlyConfigured, match="no unique constraint"):
            once_per(unfit, model=Keyed)


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

    def test_mismatch(self) -> None:
        """The same order with another amount is refused, as the record says."""
        pay(17, 500)
        with pytest.raises(FingerprintMismatch, match="payment with order=17 already exists"):
            pay(17, 501)
        assert (Calls.count, Payment.objects.get().amount) == (1, 500)

    def test_row_is_the_result(self) -> None:
        """Without a record, the row is the result, whatever the other arguments are."""
        first = pay(17, 500)
        IdempotencyKey.objects.all().delete()
        assert pay(17, 501, note="another").pk == first.pk
        assert Calls.count == 1

    def test_somebody_was_faster(self) -> None:
        """If the row is made while the function runs, its work is undone; a retry gets the row."""
        if connections["default"].vendor == "sqlite":
            pytest.skip("another connection cannot write meanwhile")

        @once_per("order", model=Payment)
        def slow(order: int, amount: int) -> Payment:
            Owner.objects.create(name="slow")
            in_threads([lambda: Payment.objects.create(order=order, amount=amount)])
            return Payment.objects.create(order=order, amount=amount)

        with pytest.raises(IntegrityError):
            slow(17, 500)
        assert slow(17, 500) == Payment.objects.get()
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
        assert [len(keys[0]), keys[0][:7]] == [71, "sha256:"]
        assert keys[1] == f"owner={owner.pk};amount=5"

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
        with pytest.raises(ValueError, match="order=None has no natural key"):
            pay(None, 500)

    def test_declaration(self) -> None:
        """What can protect nothing is refused where it is written."""
        with pytest.raises(ImproperlyConfigured, match="no parameter 'order'"):
            once_per("order", model=Payment)(lambda amount: None)

        async def asynchronous(order: int) -> None:
            pass

        with pytest.raises(ImproperlyConfigured, match="it is async"):
            once_per("order", model=Payment)(asynchronous)

    def test_race(self) -> None:
        """Of thirty at once one makes the row; the others get it, or are told to come again."""
        first = threading.Event()

        @once_per("order", model=Payment)
        def slow(order: int) -> Payment:
            Owner.objects.create(name="a")
            first.wait(PATIENCE if connections["default"].vendor != "sqlite" else 0)
            return Payment.objects.create(order=order)

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
