"""A step that failed, and whose handler went on: a decision that every later attempt repeats."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connections
from django.test import Client

from idempotency_django import engine
from idempotency_django.engine import Executed, Outcome, Result
from idempotency_django.engine.context import ExecutionContext
from idempotency_django.errors import StepFailed, StepsChanged, StoreUnavailable
from idempotency_django.models import IdempotencyKey
from idempotency_django.stores import Store
from idempotency_django.stores.database import DatabaseStore
from idempotency_django.stores.memory import MemoryStore
from idempotency_django.stores.records import Operation, Payload
from idempotency_django.testing import PATIENCE, SECOND, an_operation

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")

Handler = Callable[[ExecutionContext], Any]


class Declined(Exception):
    """What a card's provider raises."""

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(code)
        self.reason = reason


class Stolen(Declined):
    """One kind of it."""


class Died(BaseException):
    """The process ended here: nothing more is written."""


def attempt(store: Store, operation: Operation, handler: Handler) -> Outcome:
    def execute(execution: ExecutionContext) -> Result:
        return Result(handler(execution), Payload(201, (), b""))

    return engine.run(store, operation, execute, reraise)


def reraise(error: Exception) -> Result:
    raise error


class Shop:
    """Pays by card, else by transfer; the card is declined once."""

    def __init__(self, error: Exception, *, expects: tuple[type[Exception], ...] = ()) -> None:
        self.error: Exception | None = error
        self.expects = expects
        self.charged: list[str] = []
        self.asked: list[str] = []
        self.dies = True
        self.seen: list[Exception] = []

    def card(self) -> str:
        self.asked.append("card")
        if self.error:
            error, self.error = self.error, None
            raise error
        self.charged.append("card")
        return "card"

    def transfer(self) -> str:
        self.asked.append("transfer")
        if "transfer" not in self.charged:  # which has an idempotency key
            self.charged.append("transfer")
        if self.dies:
            raise Died
        return "transfer"

    def pay(self, execution: ExecutionContext) -> str:
        if self.expects:
            execution.expect(*self.expects)
        try:
            return execution.step("card", self.card)
        except (Declined, StepFailed, OSError) as error:
            self.seen.append(error)
            return execution.step("transfer", self.transfer)

    def killed(self, store: Store, operation: Operation) -> None:
        """Die while the transfer is being made."""
        with pytest.raises(Died):
            attempt(store, operation, self.pay)
        self.dies = False


def operation() -> Operation:
    return an_operation(lease=30 * SECOND)


def interrupt_and_resume(store: Store, handler: Handler) -> None:
    """Run a handler that is interrupted in its first attempt, and done in its second."""
    wanted = operation()
    with pytest.raises(InterruptedError):
        attempt(store, wanted, handler)
    assert attempt(store, wanted, handler) == Executed("done")


def test_both_branches(store: Store) -> None:
    """A process that dies in the ``except`` branch resumes in it: one of the two has charged."""
    shop, wanted = Shop(Declined(51, reason="no funds")), operation()
    shop.killed(store, wanted)
    attempt(store, wanted, shop.pay)
    assert shop.charged == ["transfer"]
    assert shop.asked == ["card", "transfer", "transfer"]


def test_stored_step_after_a_failure(store: Store) -> None:
    """The same where the step of that branch is stored already."""
    shop, wanted = Shop(Declined(51, reason="no funds")), operation()
    shop.dies = False

    def fails(execution: ExecutionContext) -> None:
        shop.pay(execution)
        raise InterruptedError

    with pytest.raises(InterruptedError):
        attempt(store, wanted, fails)
    assert attempt(store, wanted, shop.pay) == Executed("transfer")
    assert shop.asked == ["card", "transfer"]


def test_declared_error(store: Store) -> None:
    """An error that is expected is raised as itself, with its arguments and attributes."""
    shop = Shop(Declined(51, reason="no funds"), expects=(Declined,))
    wanted = operation()
    shop.killed(store, wanted)
    assert attempt(store, wanted, shop.pay) == Executed("transfer")
    [_, second] = shop.seen
    assert isinstance(second, Declined)
    assert (type(second), second.args, second.reason) == (Declined, (51,), "no funds")
    assert "attempt 1" in second.__notes__[0]


def test_subclass_of_a_declared_error(store: Store) -> None:
    """A subclass is raised as the class that is expected; the closest one, where several are."""
    for expects, raised in [((Declined, Exception), Declined), ((Exception, Stolen), Stolen)]:
        shop, wanted = Shop(Stolen(7, reason="stolen"), expects=expects), operation()
        shop.killed(store, wanted)
        attempt(store, wanted, shop.pay)
        assert type(shop.seen[1]) is raised


def test_error_without_json(store: Store) -> None:
    """What cannot be kept of an error is left out of it, its text is not."""
    shop = Shop(Declined(51, reason="no funds"), expects=(Declined,))
    assert shop.error
    shop.error.response, shop.error.args = object(), (object(), 51)  # type: ignore[attr-defined]
    wanted = operation()
    shop.killed(store, wanted)
    attempt(store, wanted, shop.pay)
    assert set(vars(shop.seen[1])) == {"reason", "__notes__"}
    assert shop.seen[1].args == (str(shop.seen[0]),)


def test_other_error(store: Store) -> None:
    """Any other is raised as ``StepFailed``, which says what failed, when, and what to declare."""
    shop, wanted = Shop(ConnectionError("refused")), operation()
    shop.killed(store, wanted)
    attempt(store, wanted, shop.pay)
    [_, error] = shop.seen
    assert isinstance(error, StepFailed)
    assert (error.step, error.attempt) == ("card", 1)
    for part in ("'card'", "attempt 1", "ConnectionError: refused", "expect(ConnectionError)"):
        assert part in str(error)


def test_error_that_is_declared_later(store: Store) -> None:
    """A handler that does not catch ``StepFailed`` goes on once it is deployed with the class."""
    shop, wanted = Shop(ConnectionError("refused")), operation()
    shop.killed(store, wanted)

    def narrow(execution: ExecutionContext) -> str:
        try:
            return execution.step("card", shop.card)
        except ConnectionError:
            return execution.step("transfer", shop.transfer)

    with pytest.raises(StepFailed):
        attempt(store, wanted, narrow)
    shop.expects = (ConnectionError,)
    assert attempt(store, wanted, shop.pay) == Executed("transfer")
    assert shop.charged == ["transfer"]


def test_nothing_follows(store: Store) -> None:
    """A failure that no step follows is no decision: the next attempt calls the step again."""
    shop, wanted = Shop(Declined(51, reason="no funds")), operation()
    with pytest.raises(Declined):
        attempt(store, wanted, lambda e: e.step("card", shop.card))
    assert attempt(store, wanted, lambda e: e.step("card", shop.card)) == Executed("card")


def test_retried_step(store: Store) -> None:
    """A step that is called until it works is done; its failures are forgotten."""
    calls: list[int] = []

    def flaky() -> int:
        calls.append(len(calls))
        if len(calls) < 3:
            raise ConnectionError
        return 3

    def handler(execution: ExecutionContext) -> list[object]:
        for _ in range(2):
            try:
                execution.step("flaky", flaky)
            except ConnectionError:
                continue
        return [execution.step("flaky", flaky), execution.step("next", lambda: 4)]

    assert attempt(store, operation(), handler) == Executed([3, 4])


def test_given_up_after_several_tries(store: Store) -> None:
    """A step that was given up fails on every call, in this attempt and in those that follow."""
    calls: list[str] = []

    def broken() -> None:
        calls.append("broken")
        raise OSError(5, "no reader")

    def handler(execution: ExecutionContext) -> str:
        execution.expect(OSError)
        for _ in range(3):
            with pytest.raises(OSError, match="no reader"):
                execution.step("broken", broken)
        execution.step("next", calls.append, "next")
        with pytest.raises(OSError, match="no reader"):
            execution.step("broken", broken)
        if execution.attempt == 1:
            raise InterruptedError
        return "done"

    interrupt_and_resume(store, handler)
    assert calls == ["broken"] * 3 + ["next"]


def test_failure_that_is_not_reached(store: Store) -> None:
    """An attempt that no longer calls the step that failed has changed its steps."""
    shop, wanted = Shop(Declined(51, reason="no funds")), operation()
    shop.killed(store, wanted)
    with pytest.raises(StepsChanged, match="'transfer' now, but attempt 1 stored 'card'"):
        attempt(store, wanted, lambda e: e.step("transfer", shop.transfer))
    with pytest.raises(StepsChanged, match="ended without the step 'card'"):
        attempt(store, wanted, lambda e: None)


def test_transaction_follows(store: Store) -> None:
    """A fenced transaction after a failure is a decision as well."""
    if not store.supports_transactions:
        return
    shop, wanted = Shop(Declined(51, reason="no funds")), operation()

    def handler(execution: ExecutionContext) -> str:
        try:
            return execution.step("card", shop.card)
        except (Declined, StepFailed):
            with execution.atomic():
                if execution.attempt == 1:
                    raise Died from None
            return "booked"

    with pytest.raises(Died):
        attempt(store, wanted, handler)
    assert attempt(store, wanted, handler) == Executed("booked")
    assert shop.asked == ["card"]


def test_unknown_outcome() -> None:
    """Nothing follows a step of which so the result is unknown committed."""
    store = _Unconfirmed("default")
    shop, wanted = Shop(Declined(51, reason="no funds")), operation()
    shop.error = None

    def handler(execution: ExecutionContext) -> None:
        with pytest.raises(StoreUnavailable):
            execution.step("card", shop.card)
        execution.step("transfer", shop.transfer)

    with pytest.raises(StoreUnavailable):
        attempt(store, wanted, handler)
    assert shop.asked == ["card"]


class _Unconfirmed(MemoryStore):
    def save_step(self, claim: Any, step: Any) -> bool:
        super().save_step(claim, step)
        raise StoreUnavailable


def test_several_failures(store: Store) -> None:
    """Each failure that was caught before a step is kept."""
    asked: list[str] = []

    def fail(name: str) -> None:
        asked.append(name)
        raise Declined(1, reason=name)

    def handler(execution: ExecutionContext) -> str:
        execution.expect(Declined)
        for name in ("visa", "amex"):
            with pytest.raises(Declined) as caught:
                execution.step(name, fail, name)
            assert caught.value.reason == name
        execution.step("transfer", asked.append, "transfer")
        if execution.attempt == 1:
            raise InterruptedError
        return "done"

    interrupt_and_resume(store, handler)
    assert asked == ["visa", "amex", "transfer"]


def test_async(store: Store) -> None:
    """The same for coroutine functions, several of which begin at once."""
    asked: list[str] = []

    async def fail() -> None:
        asked.append("card")
        raise Declined(1, reason="no funds")

    async def transfer(name: str) -> str:
        asked.append(name)
        return name

    async def handler(execution: ExecutionContext) -> list[str]:
        execution.expect(Declined)
        with pytest.raises(Declined):
            await execution.astep("card", fail)
        done = await asyncio.gather(
            execution.astep("a", transfer, "a"), execution.astep("b", transfer, "b")
        )
        if execution.attempt == 1:
            raise InterruptedError
        return done

    async def run(wanted: Operation) -> Outcome:
        async def execute(execution: ExecutionContext) -> Result:
            return Result(await handler(execution), Payload(201, (), b""))

        return await engine.arun(store, wanted, execute, reraise)

    async def both() -> Outcome:
        wanted = operation()
        try:
            with pytest.raises(InterruptedError):
                await run(wanted)
            return await asyncio.wait_for(run(wanted), PATIENCE)
        finally:
            await sync_to_async(connections.close_all)()

    assert asyncio.run(both()) == Executed(["a", "b"])
    assert sorted(asked) == ["a", "b", "card"]


def test_failure_beside_another_step(store: Store) -> None:
    """What fails in one ``gather()`` is nothing that the others follow: it is called again."""
    asked: list[str] = []

    async def card() -> str:
        asked.append("card")
        if len(asked) == 1:
            raise Declined(1, reason="no funds")
        return "card"

    async def log() -> str:
        asked.append("log")
        return "log"

    async def handler(execution: ExecutionContext) -> Result:
        steps = execution.astep("card", card), execution.astep("log", log)
        first, second = await asyncio.gather(*steps, return_exceptions=True)
        if isinstance(first, Exception):
            raise first
        return Result([first, second], Payload(201, (), b""))

    async def both() -> Outcome:
        wanted = operation()
        try:
            with pytest.raises(Declined):
                await engine.arun(store, wanted, handler, reraise)
            return await engine.arun(store, wanted, handler, reraise)
        finally:
            await sync_to_async(connections.close_all)()

    assert asyncio.run(both()) == Executed(["card", "log"])
    assert asked == ["card", "log", "card"]


def test_cancelled_step(store: Store) -> None:
    """A step that ran out of time, and whose handler went on, is not called again either."""
    asked: list[str] = []

    async def card(limit: asyncio.Timeout) -> None:
        asked.append("card")
        limit.reschedule(asyncio.get_running_loop().time())
        await asyncio.sleep(PATIENCE)

    async def handler(execution: ExecutionContext) -> Result:
        execution.expect(TimeoutError)
        try:
            async with asyncio.timeout(None) as limit:
                await execution.astep("card", card, limit)
        except TimeoutError:
            await execution.astep("transfer", lambda: asked.append("transfer"))
        if execution.attempt == 1:
            raise InterruptedError
        return Result(None, Payload(201, (), b""))

    async def both() -> Outcome:
        wanted = operation()
        try:
            with pytest.raises(InterruptedError):
                await engine.arun(store, wanted, handler, reraise)
            return await engine.arun(store, wanted, handler, reraise)
        finally:
            await sync_to_async(connections.close_all)()

    assert asyncio.run(both()) == Executed(None)
    assert asked == ["card", "transfer"]


def test_seen_in_the_admin(admin_client: Client) -> None:
    """An operator sees which steps failed, and what they failed with."""
    shop, wanted = Shop(Declined(51, reason="no <funds>")), operation()
    shop.killed(DatabaseStore("default"), wanted)
    row = IdempotencyKey.objects.get(key=wanted.key)
    page = admin_client.get(f"/admin/idempotency_django/idempotencykey/{row.pk}/change/")
    text = page.content.decode()
    assert "Step 1, card, failed in attempt 1" in text
    assert "no &lt;funds&gt;" in text
