"""How one event becomes an operation, and what its handler returned becomes its answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, assert_never

from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured

from .. import engine
from ..engine.atomic import Atomic
from ..engine.batch import Item
from ..engine.context import ExecutionContext
from ..engine.outcomes import announcement, send
from ..errors import IdempotencyError, MessageParked, OperationInProgress, StoreUnavailable
from ..functions import answer_of
from ..planning import Plan
from ..records import Record, reference
from ..stores import Store
from ..stores.atomic_blocks import is_open
from .events import Event
from .outcomes import Duplicate, Failed, Handled, Outcome
from .seen import SeenFilter

Handler = Callable[[Event, ExecutionContext], Any]

_NO_FAILURES: Final = (OperationInProgress, StoreUnavailable)
"""Errors that say nothing about the event: if it is parked after one, the next delivery says so."""


class VisiblyClaimed(Atomic):
    """For a claim that is committed first: the handler and its answer are one transaction still.

    In the transactional mode, an attempt that ends with its process leaves nothing that could be
    counted. This one leaves its claim.
    """

    def around_handler(self, store: Store) -> AbstractContextManager[bool]:
        return _shared_transaction(store)


@contextmanager
def _shared_transaction(store: Store) -> Iterator[bool]:
    with store.transaction():
        yield True


@contextmanager
def without_exits(*others: type[BaseException]) -> Iterator[None]:
    """Make ``sys.exit()`` in a handler a failure of its message: the process is for others, too.

    Args:
        others: further exceptions that are no errors.
    """
    ends: tuple[type[BaseException], ...] = (SystemExit, *others)
    try:
        yield
    except ends as error:
        what = f"sys.exit({error.code!r})" if isinstance(error, SystemExit) else repr(error)
        raise RuntimeError(
            f"The handler has ended with {what}, which would end the process that handles the "
            "other messages, too. Raise an error instead."
        ) from error


@dataclass(frozen=True, slots=True)
class Handling:
    """One event that a consumer is to handle.

    Attributes:
        plan: the operation, and where its record lives.
        event: what the handler gets.
        handler: the consumer's function for events of this type.
        seen: the consumer's filter of seen events.
    """

    plan: Plan
    event: Event
    handler: Handler
    seen: SeenFilter | None = None

    def run(self, *, visibly: bool = False) -> Handled | Duplicate:
        """Handle it now.

        Args:
            visibly: commit the claim first, even in the transactional mode.

        Raises:
            Exception: it is not handled, and was not before.
        """
        [known] = known_duplicates([self])
        if known is not None:
            return known
        plan, operation, atomic = self.plan, self.plan.operation, Atomic()
        if visibly and operation.lease is None:
            operation, atomic = replace(operation, lease=plan.policy.lease), VisiblyClaimed()
        try:
            ended = engine.run(plan.store, operation, self._execute, _raise, atomic=atomic)
        except Exception as error:
            parked = self._parked(error)
            if parked is None:
                raise
            raise parked from error
        return remembered(self, self._told(ended))

    async def arun(self) -> Handled | Duplicate:
        """:meth:`run` for an async handler."""
        [known] = await sync_to_async(known_duplicates)([self])
        if known is not None:
            return known
        plan = self.plan
        try:
            ended = await engine.arun(plan.store, plan.operation, self._aexecute, _raise)
        except Exception as error:
            parked = await sync_to_async(self._parked)(error)
            if parked is None:
                raise
            raise parked from error
        return await sync_to_async(remembered)(self, self._told(ended))

    def refuse_transaction(self, consumer: str) -> None:
        """Raise ``ImproperlyConfigured`` if nothing would be committed when the call returns."""
        using = self.plan.store.using
        if using is not None and is_open(using):
            raise ImproperlyConfigured(
                f"The consumer {consumer!r} was called within a transaction on the database "
                f"{using!r}. When it returns, the message is acknowledged, so what it did must be "
                "committed by then. Call it outside of transaction.atomic(), and mark a view that "
                "calls it with transaction.non_atomic_requests and @idempotency_exempt."
            )

    @property
    def name(self) -> str:
        """What a filter knows it by: different for each consumer, source and id."""
        return reference(self.plan.operation.key, self.plan.operation.scope)

    @property
    def only_reads(self) -> bool:
        """Whether a duplicate changes nothing, so that the store may be asked without a claim."""
        return not self.plan.operation.extend_on_replay

    def duplicate(self, record: Record) -> Duplicate | None:
        """What is said of it if this record is of the same event, and completed."""
        outcome = engine.decide(record, self.plan.operation)
        if not isinstance(outcome, engine.Replayed):
            return None
        if message := announcement(outcome):
            send(message[0], self.plan.operation, **message[1])
        told = self._told(outcome)
        return told if isinstance(told, Duplicate) else None

    @property
    def item(self) -> Item:
        """What a batch needs to know of it."""
        return Item(self.plan.operation, self._execute)

    def outcome(self, ended: engine.Outcome | Exception) -> Outcome:
        """What became of it in a batch."""
        if isinstance(ended, Exception):
            return Failed(self._parked(ended) or ended)
        try:
            return self._told(ended)
        except IdempotencyError as error:
            return Failed(error)

    def _execute(self, execution: ExecutionContext) -> engine.Result:
        with without_exits(GeneratorExit):
            return answer_of(self.plan, self.handler(self.event, execution))

    async def _aexecute(self, execution: ExecutionContext) -> engine.Result:
        with without_exits():
            return answer_of(self.plan, await self.handler(self.event, execution))

    def _told(self, ended: engine.Outcome) -> Handled | Duplicate:
        """What the consumer says of an outcome; raises if that is nothing to acknowledge."""
        match ended:
            case engine.Executed(result):
                return Handled(result)
            case engine.Replayed(record):
                payload = record.payload
                if payload is None or payload.body is None:
                    return Duplicate(None, kept=False)
                return Duplicate(payload.result)
            case engine.Held():
                error: IdempotencyError = self._is_parked("An earlier attempt at it")
            case engine.InProgress() | engine.Mismatched():
                what = f"The event {self.event.id!r} of {self.event.source!r}"
                error = engine.refusal(ended, f"{what} for {self.plan.operation.name}")
            case _:
                assert_never(ended)
        error.foreign = True  # a request that made the call is another operation
        raise error

    def _parked(self, error: Exception) -> MessageParked | None:
        """What says that this failure was the last one, if the event is parked since."""
        if isinstance(error, IdempotencyError):
            error.foreign = True
        store, operation = self.plan.store, self.plan.operation
        if operation.max_attempts is None or isinstance(error, _NO_FAILURES):
            return None
        try:
            record = store.get(operation.key, operation.scope)
        except IdempotencyError:
            return None  # nobody can say, and the next delivery finds out
        if record is None or not record.held:
            return None
        parked = self._is_parked(f"Attempt {record.attempt} at it")
        parked.__cause__, parked.foreign = error, True
        return parked

    def _is_parked(self, what: str) -> MessageParked:
        return MessageParked(
            f"The event {self.event.id!r} of {self.event.source!r} is parked by "
            f"{self.plan.operation.name}. {what} was the last one that is made without an "
            "operator. Look at its record in the admin, fix what is wrong, and release it there. "
            "Keep the message until then, for example in a dead-letter queue, and deliver it again."
        )


def known_duplicates(handlings: Sequence[Handling]) -> list[Duplicate | None]:
    """For each, the answer of the store, if a filter may have seen it and it was handled before.

    It only reads, and claims nothing. ``None``: claim it, which is exact by itself.

    Args:
        handlings: of one consumer.
    """
    nothing: list[Duplicate | None] = [None] * len(handlings)
    seen = handlings[0].seen
    if seen is None:
        return nothing
    maybe = seen.may_contain([each.name for each in handlings])
    asked = [index for index, each in enumerate(handlings) if maybe[index] and each.only_reads]
    operations = [handlings[index].plan.operation for index in asked]
    try:
        names = [(operation.key, operation.scope) for operation in operations]
        records = handlings[0].plan.store.get_many(names) if names else []
    except IdempotencyError:
        return nothing  # the claim says what is wrong with the store
    for index, record in zip(asked, records, strict=True):
        if record is not None and not record.expired:
            nothing[index] = handlings[index].duplicate(record)
    return nothing


def remembered(handling: Handling, outcome: Handled | Duplicate) -> Handled | Duplicate:
    """The outcome, of which the filter hears now that it is committed."""
    if handling.seen is not None:
        handling.seen.remember([handling.name])
    return outcome


def _raise(error: Exception) -> engine.Result:
    raise error
