"""Consumers: one effect for each event, however often its transport delivers it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final, TypeVar, assert_never

from asgiref.sync import iscoroutinefunction
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

from ... import engine
from ...engine import (
    ExecutionContext,
    Item,
    Plan,
    choose_mode,
    json_result,
    plan_call,
    run_many,
)
from ...errors import FingerprintMismatch, IdempotencyError, OperationInProgress, StoreUnavailable
from ...policy import UNSET, Policy, canonical, digest, keys, scopes
from ...stores import is_open, reference, stores
from .conf import conf
from .errors import DeadLettered, UnknownEventType
from .events import Event
from .seen import SeenFilter

LIFETIME: Final = timedelta(days=30)
"""How long a consumer remembers an event by default."""

METHOD: Final = "EVENT"
"""The value in place of the HTTP method in the audit."""

_REJECTED: Final = (DeadLettered, FingerprintMismatch, UnknownEventType)
_NO_FAILURES: Final = (OperationInProgress, StoreUnavailable)
"""Errors that are not about the event: if it was the last attempt, the next delivery reports
that.
"""

ANY: Final = "*"
"""The type of the handler for all types without a handler of their own."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Handled:
    """The handler ran in this call, and what it did is committed. Acknowledge the message.

    Attributes:
        result: what the handler returned, as it reads back from JSON.
    """

    result: Any


@dataclass(frozen=True, slots=True)
class Duplicate:
    """The message was handled before. Acknowledge it.

    Attributes:
        result: what the handler returned at that time; ``None`` if it was not kept, because it was
            too large, or the policy has ``max_response_bytes=0``.
    """

    result: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """The message was not handled, and nothing that its handler did in the database is committed.

    Attributes:
        error: why; what :meth:`Consumer.handle` would have raised.
    """

    error: Exception

    @property
    def rejected(self) -> bool:
        """Whether to move the message to a dead-letter queue: another delivery ends the same way.

        ``False``: deliver it again.
        """
        return isinstance(self.error, _REJECTED)


Outcome = Handled | Duplicate | Failed

_Function = TypeVar("_Function", bound=Callable[..., Any])
Handler = Callable[[Event, ExecutionContext], Any]
"""What is called for an event of its types."""


@contextmanager
def without_exits() -> Iterator[None]:
    """Make what would end the process a failure of the message: the process is for others, too.

    That is ``sys.exit()`` and any other exception that is no error, such as gevent's ``Timeout``.
    Ctrl-C is not the handler's.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise RuntimeError(
            f"The handler raised {error!r}, which would end the process. Raise a subclass of "
            "Exception instead."
        ) from error


@dataclass(frozen=True, slots=True)
class EventExecution:
    """One event to handle once.

    Attributes:
        plan: the operation, and where its record lives.
        event: what the handler gets.
        handler: the handler for events of this type.
        seen: the consumer's filter of seen events.
    """

    plan: Plan
    event: Event
    handler: Handler
    seen: SeenFilter | None = None

    def run(self, *, claim_first: bool = False) -> Handled | Duplicate:
        """Handle it now.

        Args:
            claim_first: commit the claim first, even in the transactional mode, where an attempt
                that ends with its process leaves nothing that could be counted.

        Raises:
            Exception: it is not handled, and was not before.
        """
        if known := known_duplicates([self])[0]:
            return known
        store, operation = self.plan.store, self.plan.operation
        together = claim_first and operation.lease is None
        if together:
            operation = replace(operation, lease=self.plan.policy.lease)
        try:
            ended = engine.run(store, operation, self.execute, engine.reraise, together=together)
        except Exception as error:
            if dead := self._dead_lettered(error):
                raise dead from error
            raise
        outcome = self.to_outcome(ended)
        if self.seen is not None:  # the outcome is committed: now the filter may know of it
            self.seen.remember([self.name])
        return outcome

    @property
    def name(self) -> str:
        """Its name in a filter: different for each consumer, source and id."""
        return reference(self.plan.operation.key, self.plan.operation.scope)

    def execute(self, execution: ExecutionContext) -> engine.Result:
        """Call the handler, within an execution of the operation."""
        with without_exits():
            return json_result(self.plan, self.handler(self.event, execution))

    def to_outcome(self, ended: engine.Outcome) -> Handled | Duplicate:
        """The consumer's outcome for an outcome of the engine.

        Raises:
            IdempotencyError: the message is not to be acknowledged.
        """
        match ended:
            case engine.Executed(result):
                return Handled(result)
            case engine.Replayed(record):
                if record.payload is None or record.payload.body is None:
                    return Duplicate(None)
                return Duplicate(record.payload.result)
            case engine.Expired():
                return Duplicate(None)
            case engine.Held():
                error: IdempotencyError = self._dead_letter_error("An earlier attempt at it")
            case engine.InProgress() | engine.Mismatched():
                what = f"The event {self.event.id!r} of {self.event.source!r}"
                error = engine.refusal(ended, f"{what} for {self.plan.operation.name}")
            case _:
                assert_never(ended)
        error.foreign = True  # a request that made the call is another operation
        raise error

    def of_batch(self, ended: engine.Outcome | Exception) -> Outcome:
        """The outcome of an event that was handled in a batch."""
        if isinstance(ended, Exception):
            return Failed(self._dead_lettered(ended) or ended)
        try:
            return self.to_outcome(ended)
        except IdempotencyError as error:
            return Failed(error)

    def _dead_lettered(self, error: Exception) -> DeadLettered | None:
        """The error of an event whose last attempt has failed with this one, if it was the last."""
        if isinstance(error, IdempotencyError):
            error.foreign = True
        store, operation = self.plan.store, self.plan.operation
        if operation.max_attempts is None or isinstance(error, _NO_FAILURES):
            return None
        try:
            record = store.get(operation.key, operation.scope)
        except IdempotencyError:
            return None  # the next delivery finds out
        if record is None or not record.held:
            return None
        dead = self._dead_letter_error(f"Attempt {record.attempt} at it")
        dead.__cause__, dead.foreign = error, True
        return dead

    def _dead_letter_error(self, what: str) -> DeadLettered:
        return DeadLettered(
            f"The event {self.event.id!r} of {self.event.source!r} is dead-lettered by "
            f"{self.plan.operation.name}. {what} was the last automatic one. Fix the cause. If "
            "the inbox in the admin has the message, retry it there. Otherwise keep it, for "
            "example in a dead-letter queue, release its record in the admin, and deliver it "
            "again."
        )


def known_duplicates(executions: Sequence[EventExecution]) -> list[Duplicate | None]:
    """What the store has for each event that a filter may have seen, if it was handled before.

    It only reads, and claims nothing. ``None``: claim it, which is exact.

    Args:
        executions: of one consumer.
    """
    known: list[Duplicate | None] = [None] * len(executions)
    seen, store = executions[0].seen, executions[0].plan.store
    if seen is None:
        return known
    maybe = seen.may_contain([each.name for each in executions])
    # If a duplicate extends the record's lifetime, a claim in the store is needed.
    candidates = [
        (place, each, each.plan.operation)
        for place, each in enumerate(executions)
        if maybe[place] and not each.plan.operation.extend_on_replay
    ]
    try:
        records = store.get_many([(x.key, x.scope) for _, _, x in candidates]) if candidates else []
    except IdempotencyError:
        return known  # the claim raises the store's error
    for (place, execution, operation), record in zip(candidates, records, strict=True):
        if record is None or record.expired:
            continue
        if replayed := engine.replay(record, operation):
            outcome = execution.to_outcome(replayed)
            known[place] = outcome if isinstance(outcome, Duplicate) else None
    return known


class Consumer:
    """Handles each event once; a redelivered event gets the first result. ::

        billing = Consumer("billing")

        @billing.on("order.paid")
        def book(event):
            return {"entry": Entry.objects.create(order_id=event.data["id"]).pk}

        outcome = billing.handle(Event.from_json(message.body))

    What a handler writes to the store's database is committed together with the fact that the event
    was handled, before :meth:`handle` returns: acknowledge the message then. Two consumers of one
    event each handle it, because the consumer's name is part of what is recorded.

    Args:
        name: letters, digits and ``_.-``, such as ``"billing"``. Under another name, it would
            handle every event again.
        ttl: how long an event is remembered, which must be longer than its transport can deliver it
            again; ``None``: forever. By default the policy's ``ttl``, or 30 days.
        max_attempts: how many attempts at an event may fail before it is dead-lettered; ``None``:
            all.
        policy: the policy, for example ``Policy(mode="leased")`` where handlers call
            ``execution.step()``; by default the project's.
        seen: a filter that is asked before an event is claimed, so that a duplicate costs one read;
            for streams with many of them.

    Raises:
        ValueError: the name or ``max_attempts`` cannot be used.
        ImproperlyConfigured: the policy asks for what a consumer does not have.
    """

    def __init__(
        self,
        name: str,
        *,
        ttl: timedelta | None = UNSET,
        max_attempts: int | None = 5,
        policy: Policy | None = None,
        seen: SeenFilter | None = None,
    ) -> None:
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"{name!r} is not a valid name of a consumer. Use 1 to 100 letters, digits, '_', "
                "'.' and '-', such as 'billing'."
            )
        if max_attempts is not None and max_attempts < 1:
            raise ValueError(
                f"The consumer {name!r} has max_attempts={max_attempts}. Allow 1 attempt or more, "
                "or None for any number."
            )
        if policy is not None and policy.check_replay not in (UNSET, None):
            raise ImproperlyConfigured(
                f"The policy of the consumer {name!r} has check_replay=, which checks the caller "
                "of an HTTP request. A message has none: check its sender before calling the "
                "consumer."
            )
        policy = (policy or Policy()).over(Policy(ttl=LIFETIME))
        if ttl is not UNSET:
            policy = policy.replace(ttl=ttl)
        self.name = name
        self.max_attempts = max_attempts
        self.seen = seen
        self._policy = policy
        self._handlers: dict[str, Handler] = {}

    def on(self, *types: str) -> Callable[[_Function], _Function]:
        """Register the decorated function for events of these types.

        It is called with the :class:`~.events.Event` and, if it takes a second argument, the
        :class:`~idempotency_django.engine.context.ExecutionContext` of the attempt. It returns what
        JSON can say. If it raises, what it wrote is rolled back.

        Args:
            types: the types of events; ``"*"``: all without a handler of their own.

        Raises:
            TypeError: no type is given, or one of them is not a text.
            ValueError: one of them has a handler already.
            ImproperlyConfigured: the function is async.
        """
        if not types or not all(isinstance(each, str) for each in types):
            raise TypeError(
                f"on() of {self.name!r} takes types of events, not {types!r}. Pass the type in "
                'parentheses: on("order.paid").'
            )
        for each in types:
            if each in self._handlers:
                raise ValueError(
                    f"{self.name!r} already has a handler for {each!r}. Let one handler call both "
                    "functions."
                )

        def register(function: _Function) -> _Function:
            if iscoroutinefunction(function):
                raise ImproperlyConfigured(
                    f"The handler {function} of {self.name!r} is async. Make it a plain function, "
                    "which may use async_to_sync()."
                )
            self._handlers.update(dict.fromkeys(types, _as_handler(function)))
            return function

        return register

    def handles(self, type: str) -> bool:  # noqa: A002  # CloudEvents' name for it
        """Whether there is a handler for events of this type."""
        return type in self._handlers or ANY in self._handlers

    def handle(self, event: Event, *, redelivered: bool = False) -> Handled | Duplicate:
        """Handle the event, unless it was handled before.

        Args:
            event: the event.
            redelivered: whether the transport says that it delivered the message before. Then the
                claim is committed first, for one more transaction, so that an attempt that ends
                with its process counts as well.

        Returns:
            :class:`Handled` or :class:`Duplicate`, with the result.

        Raises:
            UnknownEventType: the consumer has no handler for it. Nothing is recorded, so that a
                later version of the program can handle it.
            DeadLettered: attempt number ``max_attempts`` has failed, now or before; or it was
                interrupted, and the policy has ``on_interrupted="hold"``.
            FingerprintMismatch: another event with this source and id was handled before.
            OperationInProgress: another process handles it; ``remaining`` are the seconds that
                their lease still runs.
            StoreUnavailable: nothing is committed, or it is unknown. Deliver again.
            ImproperlyConfigured: a transaction is open around the call, so that nothing would be
                committed when it returns.
            Exception: an error of the handler, whose writes are rolled back.
        """
        execution = self.execution_of(event)
        self._validate_no_transaction(execution)
        return execution.run(claim_first=redelivered)

    def handle_many(self, events: Sequence[Event]) -> list[Outcome]:
        """Handle events in their order, in one transaction if none of them fails.

        If one fails, all are rolled back, and each is handled alone: no failure undoes a
        neighbour. A store without transactions, and the leased mode, handle one after the other.
        An attempt that ends with its process is not counted: pass what the broker delivers again to
        :meth:`handle`.

        Args:
            events: the events, of which some may be the same.

        Returns:
            The outcomes in the order of the events. Each is :class:`Handled`,
            :class:`Duplicate`, or :class:`Failed` with the error that
            :meth:`handle` would have raised.

        Raises:
            ImproperlyConfigured: as for :meth:`handle`.
        """
        outcomes: dict[int, Outcome] = {}
        executions: dict[int, EventExecution] = {}
        for place, event in enumerate(events):
            try:
                executions[place] = self.execution_of(event)
            except (UnknownEventType, TypeError) as error:
                outcomes[place] = Failed(error)
        for execution in [*executions.values()][:1]:  # they have one store
            self._validate_no_transaction(execution)
        if executions:
            outcomes |= self._handle_together(executions)
        return [outcomes[place] for place in range(len(events))]

    def _handle_together(self, executions: dict[int, EventExecution]) -> dict[int, Outcome]:
        known = zip(executions, known_duplicates([*executions.values()]), strict=True)
        outcomes: dict[int, Outcome] = {place: each for place, each in known if each is not None}
        rest = {place: each for place, each in executions.items() if place not in outcomes}
        items = [Item(each.plan.operation, each.execute) for each in rest.values()]
        [store] = {each.plan.store for each in executions.values()}
        for (place, execution), ended in zip(rest.items(), run_many(store, items), strict=True):
            outcomes[place] = execution.of_batch(ended)
        if self.seen is not None:
            handled = [at for at in rest if not isinstance(outcomes[at], Failed)]
            self.seen.remember([rest[at].name for at in handled])
        return outcomes

    def validate(self) -> None:
        """Refuse to begin, where :meth:`handle` could not handle any event.

        Raises:
            ImproperlyConfigured: the policy needs what its store or mode cannot promise.
        """
        policy = self._policy.resolved()
        choose_mode(policy, stores[policy.store])

    def execution_of(self, event: Event, *, key: str = "") -> EventExecution:
        """The handling of the event.

        Args:
            event: the event.
            key: the key of its record, where that is not its id.

        Raises:
            UnknownEventType: the consumer has no handler for it.
        """
        handler = self._handler(event)
        plan = plan_call(
            self._policy.resolved(),
            key=key or keys.fit(event.id),
            scope=self.scope(event.source),
            name=f"{self.name} {event.type}",
            content_digest=_content_digest(event),
            method=METHOD,
            max_attempts=self.max_attempts,
            caused_by=event.caused_by,
        )
        return EventExecution(plan, event, handler, self.seen)

    def scope(self, source: str) -> str:
        """The scope of an event: the consumer's name, and the event's source."""
        return scopes.join(f"consumer:{self.name}:{source}")

    def _validate_no_transaction(self, execution: EventExecution) -> None:
        using = execution.plan.store.using
        if using is not None and is_open(using):
            raise ImproperlyConfigured(
                f"The consumer {self.name!r} was called within a transaction on the database "
                f"{using!r}. The message is acknowledged when the call returns, so its effects "
                "must be committed by then. Call it outside of transaction.atomic(), and mark a "
                "view that calls it with transaction.non_atomic_requests and @idempotency_exempt."
            )

    def _handler(self, event: Event) -> Handler:
        if not isinstance(event, Event):
            raise TypeError(
                f"The consumer {self.name!r} got a {type(event).__name__} instead of an Event. "
                "Create an Event, for example with Event.from_json()."
            )
        handler = self._handlers.get(event.type) or self._handlers.get(ANY)
        if handler is None:
            known = ", ".join(sorted(self._handlers)) or "none"
            raise UnknownEventType(
                f"The consumer {self.name!r} has no handler for events of the type "
                f"{event.type!r}; it handles {known}. Nothing was executed or recorded. Register "
                "a handler with Consumer.on(), and deliver the event again."
            )
        return handler


def _as_handler(function: Callable[..., Any]) -> Handler:
    """The function, or one that calls it with the event only, if it takes no execution."""
    try:
        inspect.signature(function).bind("event", "execution")
    except TypeError:
        return lambda event, _: function(event)
    return function


def _content_digest(event: Event) -> str:
    """The digest of what tells two events apart that have one source and id."""
    return digest(canonical((event.type, event.subject, event.data)))


def consumers() -> dict[str, Consumer]:
    """The consumers that ``IDEMPOTENCY["CONSUMERS"]`` lists, by name.

    Raises:
        ImproperlyConfigured: a path leads to no consumer, or two have one name.
    """
    listed: dict[str, Consumer] = {}
    for path in conf.consumers:
        consumer = consumer_at(path)
        if listed.setdefault(consumer.name, consumer) is not consumer:
            raise ImproperlyConfigured(
                f"IDEMPOTENCY['CONSUMERS'] lists two consumers called {consumer.name!r}. Rename "
                "one of them."
            )
    return listed


def consumer_at(path: str) -> Consumer:
    """The consumer at a path such as ``"shop.consumers.billing"``.

    Raises:
        ImproperlyConfigured: the path leads to no consumer.
    """
    try:
        consumer = import_string(path)
    except ImportError as error:
        raise ImproperlyConfigured(
            f"There is no consumer at {path!r}: {error}. Use the path of the module and the "
            "consumer in it, such as 'shop.consumers.billing'."
        ) from error
    if not isinstance(consumer, Consumer):
        raise ImproperlyConfigured(
            f"{path!r} is a {type(consumer).__name__}, not a Consumer. Use the path of the module "
            "and the consumer in it, such as 'shop.consumers.billing'."
        )
    return consumer
