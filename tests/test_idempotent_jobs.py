"""Jobs of any queue that are executed once: by hand, and by real queues."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured

from idempotency_django.engine.context import current_execution
from idempotency_django.errors import FingerprintMismatch
from idempotency_django.jobs import idempotent_job
from idempotency_django.policy import Policy
from idempotency_django.testing import in_threads
from tests.models import Effect
from tests.support import effects, record

pytestmark = pytest.mark.django_db(transaction=True)

LEASED = Policy(mode="leased")


def book(reference: Any) -> int:
    return int(Effect.objects.create(reference=str(reference)).pk)


@idempotent_job(key="order-{order_id}")
def pay(order_id: int, amount: int = 5) -> list[int]:
    """A job."""
    return [book(order_id), amount]


@idempotent_job(key=lambda order_id: order_id, policy=LEASED, name="pay", scope="payments")
async def apay(order_id: int) -> list[Any]:
    execution = current_execution()
    assert execution is not None
    return [await execution.astep("book", book, order_id), execution.attempt]


# By hand.


def test_once() -> None:
    """A second call with the key returns the first result, however its arguments are passed."""
    first = pay(17, 5)
    assert pay(amount=5, order_id=17) == first
    assert effects("17") == 1
    assert record("order-17").scope == f"job:{__name__}.pay"
    with pytest.raises(FingerprintMismatch):
        pay(17, 6)


def test_once_in_a_coroutine() -> None:
    """The same for a coroutine function."""

    async def twice() -> list[Any]:
        return [await apay(17), await apay(17)]

    first, second = asyncio.run(twice())
    assert first == second
    assert effects("17") == 1
    assert record("17").scope == "payments"


def test_looks_like_the_function() -> None:
    """A queue finds the function's own name, module and docstring."""
    assert (pay.__name__, pay.__module__, pay.__doc__) == ("pay", __name__, "A job.")


def test_excluded_argument() -> None:
    """What a queue passes of its own is no part of what is asked for."""

    @idempotent_job(key="{order_id}", exclude=["context"])
    def job(context: object, order_id: int) -> int:
        return book(order_id)

    assert job(object(), 17) == job(object(), 17)
    assert effects("17") == 1


def test_wrong_key() -> None:
    """A template that no call could fill in is refused at once."""
    with pytest.raises(ImproperlyConfigured, match="'order', which is not one of its arguments"):

        @idempotent_job(key="{order}")
        def job(order_id: int) -> None: ...


def test_at_once() -> None:
    """Of deliveries at the same moment one is executed; others come again, or wait."""

    @idempotent_job(key="{order_id}", policy=Policy(on_conflict="wait"))
    def waiting(order_id: int) -> int:
        return book(order_id)

    assert len(set(in_threads([lambda: waiting(17)] * 8))) == 1
    assert effects("17") == 1
