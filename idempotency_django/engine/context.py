"""The context of an execution, which a handler gets: ``request.idempotency``; and its steps.

Nothing here knows HTTP: views, tasks and plain functions get the same object.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from functools import cached_property, partial
from itertools import count
from typing import Any, Final

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.core.serializers.json import DjangoJSONEncoder
from django.db import transaction

from ..errors import ClaimLost, StepsChanged
from ..stores import Store
from ..stores.records import NAMESPACE, Claim, Operation, Step, derived_key, reference
from .leases import Lease

CURRENT: Final[ContextVar[ExecutionContext | None]] = ContextVar(
    "idempotency_execution", default=None
)
"""The execution of the running handler. The engine sets it."""


@contextmanager
def entered(execution: ExecutionContext) -> Iterator[None]:
    """Make the execution the current one for the length of the block."""
    token = CURRENT.set(execution)
    try:
        yield
    finally:
        execution.is_over = True
        with suppress(ValueError):  # a coroutine that is closed in another context
            CURRENT.reset(token)


def current_execution() -> ExecutionContext | None:
    """The execution whose handler this code runs in, or ``None`` outside of any handler.

    Threads that the handler starts are not in it.
    """
    return CURRENT.get()


def is_executing(store: Store, operation: Operation) -> bool:
    """Whether this code runs in the handler of an operation with the same key and database.

    A handler that asks for its own key would run again within itself: the database's locks are
    re-entrant, so they let the connection that holds them through.
    """
    asked = store.using, operation.key, operation.scope
    context = CURRENT.get()
    while context is not None:
        if not context.is_over and (context.using, context.key, context.scope) == asked:
            return True
        context = context.outer
    return False


# Recovery points: the steps of an attempt, which are found by their names.

LONGEST_NAME: Final = 100  # characters of a step's name

_running: ContextVar[str] = ContextVar("idempotency_step", default="")

_encode = DjangoJSONEncoder(allow_nan=False).encode


def current_step() -> str:
    """The name of the step that is running here, or an empty text."""
    return _running.get()


def as_json(name: str, result: Any) -> str:
    """The result of the function or step ``name`` as JSON, to be stored.

    Raises:
        TypeError: it is not JSON.
    """
    try:
        return _encode(result)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"{name!r} returned a value that is not JSON, so it cannot be stored: {error}. Return "
            "what DjangoJSONEncoder can write, for example an id instead of an object."
        ) from error


class Steps:
    """The called and stored steps of one attempt.

    Args:
        store: where they are stored.
        claim: the attempt's.
        lease: the claim's.
    """

    def __init__(self, store: Store, claim: Claim, lease: Lease) -> None:
        self._store = store
        self._claim = claim
        self._lease = lease
        self._called: dict[str, object] = {}
        self._results: dict[str, str] = {}
        self._are_loaded = claim.attempt == 1

    @contextmanager
    def calling(self, name: str) -> Iterator[None]:
        """In the block, the step is running. If it fails, it may be called again.

        Raises:
            ValueError: it cannot have this name, or another step of the attempt has it.
            ImproperlyConfigured: it would be part of another step.
        """
        if not (isinstance(name, str) and 0 < len(name) <= LONGEST_NAME):
            raise ValueError(
                f"{name!r} is not a valid name of a step: it must have 1-{LONGEST_NAME} characters."
            )
        if outer := current_step():
            raise ImproperlyConfigured(
                f"The step {name!r} was started within the step {outer!r} and would commit with "
                "it. Start it after that step."
            )
        call = object()
        if self._called.setdefault(name, call) is not call:  # atomic: another thread may call it
            raise ValueError(
                f"This operation has two steps with the name {name!r}. Give each its own name."
            )
        token = _running.set(name)
        try:
            yield
        except BaseException:
            if name not in self._results:
                del self._called[name]
            raise
        finally:
            _running.reset(token)

    def result_of(self, name: str) -> str | None:
        """What an earlier attempt stored for the step, if it stored anything.

        Raises:
            ClaimLost: the operation was taken over, so no other step may begin.
        """
        self._load()
        result = self._results.get(name)
        if result is None:
            self._lease.ensure()
        return result

    def commit(self, name: str, function: Callable[[], Any]) -> str:
        """Call the function and store its result, in one transaction; the result as JSON.

        Raises:
            TypeError: the result is not JSON.
            ClaimLost: the operation was taken over.
        """
        committed: dict[str, str] = {}
        note = partial(self._results.update, committed)
        with self._store.durable(f"The step {name!r}"):
            # Before the function's own hooks: one of them may raise after the commit and end them
            # all.
            self._store.on_commit(note)
            result = as_json(name, function())
            step = Step(name=name, attempt=self._claim.attempt, result=result)
            if not self._store.save_step(self._claim, step):
                raise ClaimLost
            committed[name] = result
        note()  # a test's transaction runs no hooks
        return result

    def validate_all_called(self) -> None:
        """Raise ``StepsChanged`` if this attempt never called a stored step.

        It is called before the operation is completed: what that step did would be forgotten.
        """
        self._load()
        left = [name for name in self._results if name not in self._called]
        if left:
            steps = "the steps" if len(left) > 1 else "the step"
            raise StepsChanged(
                f"Attempt {self._claim.attempt} of this operation ended without {steps} "
                f"{', '.join(map(repr, left))} of an earlier attempt. The step was probably "
                "renamed or removed, or a condition skipped it. The effects of both attempts "
                "stay. Restore the step, and retry with the same key."
            )

    def _load(self) -> None:
        """Ask the store what earlier attempts have stored, once."""
        if not self._are_loaded:
            self._results |= {step.name: step.result for step in self._store.steps(self._claim)}
            self._are_loaded = True


class ExecutionContext:
    """One attempt at an operation, as its handler sees it.

    Args:
        store: where the operation's record lives.
        claim: the right to execute.
        lease: the claim's, or ``None`` if a transaction holds the claim.
    """

    pinned = False
    """Whether the key stays with this request if the attempt fails. It does once a key was derived,
    because the effects under that key stay."""

    is_over = False
    """Whether the handler has ended; code that copied its context may still run."""

    def __init__(self, store: Store, claim: Claim, lease: Lease | None) -> None:
        self._store = store
        self._claim = claim
        self._lease = lease
        self.outer = CURRENT.get()
        """The execution whose handler has asked for this one, if there is one."""
        self._steps = Steps(store, claim, lease) if lease and store.supports_steps else None

    @cached_property
    def _calls(self) -> dict[str, dict[str, Iterator[int]]]:  # few handlers send any
        return {}

    def __repr__(self) -> str:
        return f"<ExecutionContext {self.key!r} in {self.scope!r}, attempt {self.attempt}>"

    @property
    def operation(self) -> Operation:
        """The operation that is executed."""
        return self._claim.operation

    @property
    def using(self) -> str | None:
        """The database of its record, if the store keeps it in one."""
        return self._store.using

    @property
    def key(self) -> str:
        """The operation's key."""
        return self._claim.key

    @property
    def scope(self) -> str:
        """The operation's scope."""
        return self._claim.scope

    @property
    def attempt(self) -> int:
        """1 for the first execution of this key, and one more for each later one."""
        return self._claim.attempt

    @property
    def interrupted(self) -> bool:
        """Whether the attempt before this one was interrupted: its lease ended before it did."""
        return self._claim.interrupted

    @property
    def reference(self) -> str:
        """The reference of its record, for the ``caused_by`` of other operations."""
        return self.operation.cause_reference or reference(self.key, self.scope)

    def derive_key(self, name: str) -> str:
        """A key for another service: a UUID (RFC 9562, version 5).

        It is the same on every attempt and on every machine; while the operation has a record, also
        after a rotation of ``SECRET_KEY``. It differs for each name, for each operation, and for
        each request that asks for something else. Without the secret, no guess at the request
        can be tested against it. Send it to a payment provider as *its* idempotency key.

        From then on the operation's key is pinned to its request: if the attempt fails, another
        request with the key is refused.

        Args:
            name: what the key is for, such as ``"charge"``.
        """
        self.pinned = True
        fingerprint = self.operation.fingerprint
        return derived_key(scope=self.scope, key=self.key, fingerprint=fingerprint, name=name)

    def key_of_call(self, call: str) -> str:
        """The key of an outgoing request for which the handler has named none.

        It is derived from the step that runs, and from how many such requests came before it in
        that step, or in the handler outside of steps. A step that is called again begins anew.

        Args:
            call: what is called, such as ``"POST https://pay.example.com/charges"``.
        """
        step = current_step()
        number = next(self._calls.setdefault(step, {}).setdefault(call, count()))
        return self.derive_key("\0".join(("call", step, call, str(number))))

    def derive_id(self, name: str) -> str | None:
        """An id that all attempts at this record share, and no other record of the key has.

        It is random, so no guess at the request can be tested against it. In the transactional
        mode it is ``None``: no attempt resumes another one there.

        Like :meth:`derive_key`, it pins the operation's key to its request.

        Args:
            name: what is named, such as the first message of a topic.
        """
        if self._lease is None:
            return None
        self.pinned = True  # another request must not get the same id
        return str(uuid.uuid5(NAMESPACE, f"{self._claim.origin}:{name}"))

    def atomic(self) -> AbstractContextManager[None]:
        """A transaction on the store's database that a late owner cannot commit.

        Raises:
            ClaimLost: another attempt took over after the lease expired. It is raised at the end of
                the block, after the rollback, or before the block begins.
            ImproperlyConfigured: the store has no transactions, or one is open already.
        """
        if self._lease is None:
            return transaction.atomic(using=self._store.using)  # the claim's own holds it already
        self._lease.ensure()
        return self._store.fenced(self._claim)

    def step(self, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call the function, store its result once per key, and return the result.

        It runs in a transaction on the store's database, so what it writes there commits together
        with the result. If it was interrupted before that commit, the next attempt calls it again:
        pass ``derive_key(name)`` to each service that it calls.

        Args:
            name: the step's name; each step of an operation has its own.
            function: what to do.
            args: positional arguments for it.
            kwargs: keyword arguments for it.

        Returns:
            The result as it reads back from JSON, on every attempt, so a tuple is a list.

        Raises:
            TypeError: the result is not JSON; the step was rolled back.
            ValueError: another step of the attempt has this name, or it is too long.
            ClaimLost: the operation was taken over; the step was not begun, or was rolled back.
            ImproperlyConfigured: the policy is not ``leased``; the store keeps no steps; or a
                transaction around the step would keep it from committing.
        """
        steps = self._steps_for(name)
        with steps.calling(name):
            result = steps.result_of(name)
            if result is None:
                result = steps.commit(name, partial(function, *args, **kwargs))
        return json.loads(result)

    async def astep(
        self,
        name: str,
        function: Callable[..., Any] | Callable[..., Awaitable[Any]],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """:meth:`step` for an async handler.

        A coroutine function is awaited outside any transaction, and its result is stored
        afterwards. A plain function runs in a thread, within the transaction, as in :meth:`step`.
        """
        if not iscoroutinefunction(function):
            return await sync_to_async(self.step)(name, function, *args, **kwargs)
        steps = self._steps_for(name)
        with steps.calling(name):
            result = await sync_to_async(steps.result_of)(name)
            if result is None:
                returned = await function(*args, **kwargs)
                result = await sync_to_async(steps.commit)(name, lambda: returned)
        return json.loads(result)

    def validate_all_called(self) -> None:
        """Raise ``StepsChanged`` if this attempt never called a stored step of an earlier one."""
        if self._steps is not None:
            self._steps.validate_all_called()

    def _steps_for(self, name: str) -> Steps:
        """The steps, if the policy and the store can keep this one, which is called now."""
        if self._lease is None:
            raise ImproperlyConfigured(
                f"The step {name!r} cannot be stored: in the transactional mode, a failed attempt "
                "is rolled back as a whole. Give the policy mode='leased'."
            )
        if self._steps is None:
            raise ImproperlyConfigured(
                f"The step {name!r} cannot be stored: the store {self._store.alias!r} "
                f"({type(self._store).__name__}) doesn't support steps. Use "
                "idempotency_django.stores.database.DatabaseStore."
            )
        self._calls.pop(name, None)
        return self._steps
