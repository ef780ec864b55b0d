"""Consumers: one effect for each event, however often its transport delivers it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Final, TypeVar

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.core.exceptions import ImproperlyConfigured

from ..errors import UnknownEventType
from ..planning import lease_of, plan_call
from ..policy import UNSET, Policy, keys
from ..policy.canonical import canonical, content_digest
from ..stores import stores
from .batching import alone, together
from .events import Event
from .handling import Handler, Handling
from .outcomes import Duplicate, Failed, Handled, Outcome
from .policies import RecordOf, policy_of, refuse_types, refuse_unfit, scope_of
from .seen import SeenFilter

METHOD: Final = "EVENT"
"""What stands for the HTTP method in the audit."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", re.ASCII)
_Handler = TypeVar("_Handler", bound=Handler)


class Consumer:
    """Handles each event once; a redelivered event gets the first result. ::

        billing = Consumer("billing")

        @billing.on("order.paid")
        def book(event, execution):
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
        max_attempts: how many attempts at an event may fail before it is parked; ``None``: all.
        policy: the policy, for example ``Policy(mode="leased")`` where handlers have effects
            outside the database; by default the project's.
        store: the alias of the store; by default the policy's.
        federated: whether the events come from several senders who do not trust one another. Then
            every call says who sent the event, and no sender gets the results of another.
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
        store: str | None = None,
        federated: bool = False,
        seen: SeenFilter | None = None,
    ) -> None:
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"A consumer cannot be called {name!r}. Give it a name of 1 to 100 letters, digits "
                "and the characters '_', '.' and '-', such as 'billing'."
            )
        if max_attempts is not None and max_attempts < 1:
            raise ValueError(
                f"The consumer {name!r} has max_attempts={max_attempts}. Allow 1 attempt or more, "
                "or None for any number."
            )
        self.name = name
        self.max_attempts = max_attempts
        self.federated = federated
        self.seen = seen
        self._policy = policy_of(name, policy, ttl, store)
        self._handlers: dict[str, Handler] = {}

    def __repr__(self) -> str:
        return f"<Consumer {self.name!r} of {', '.join(self._handlers) or 'nothing yet'}>"

    def on(self, *types: str) -> Callable[[_Handler], _Handler]:
        """Register the decorated function for events of these types.

        It is called with the :class:`~.events.Event` and the
        :class:`~idempotency_django.engine.context.ExecutionContext` of the attempt, and returns
        what JSON can say. If it raises, what it wrote is rolled back.

        Raises:
            ValueError: no type is given, or one of them has a handler already.
            TypeError: a type is not a text.
            ImproperlyConfigured: the function cannot be called with an event and an execution.
        """
        refuse_types(types, f"the consumer {self.name!r}")
        for taken in self._handlers.keys() & {*types}:
            raise ValueError(
                f"The consumer {self.name!r} already has a handler for {taken!r}. Let one handler "
                "call both functions, or make a second consumer."
            )

        def register(handler: _Handler) -> _Handler:
            refuse_unfit(handler, f"the consumer {self.name!r}")
            self._handlers.update(dict.fromkeys(types, handler))
            return handler

        return register

    def handles(self, type: str) -> bool:  # noqa: A002  # CloudEvents' name for it
        """Whether there is a handler for events of this type."""
        return type in self._handlers

    def handle(
        self, event: Event, *, sender: str = "", redelivered: bool = False
    ) -> Handled | Duplicate:
        """Handle the event, unless it was handled before.

        Args:
            event: the event.
            sender: who sent it, as the transport has authenticated them; for a federated consumer.
            redelivered: whether the transport says that it delivered the message before. Then the
                claim is committed first, for one more transaction, so that an attempt that ends
                with its process counts as well.

        Returns:
            :class:`~.outcomes.Handled` or :class:`~.outcomes.Duplicate`, with the result.

        Raises:
            UnknownEventType: the consumer has no handler for it. Nothing is recorded, so that a
                later version of the program can handle it.
            MessageParked: attempt number ``max_attempts`` has failed, now or before; or it was
                interrupted, and the policy has ``on_interrupted="hold"``.
            FingerprintMismatch: another event with this source and id was handled before.
            OperationInProgress: somebody else is handling it; ``remaining`` are the seconds that
                their lease still runs.
            StoreUnavailable: nothing is committed, or nobody knows whether it is. Deliver again.
            ImproperlyConfigured: a transaction is open around the call, so that nothing would be
                committed when it returns.
            Exception: whatever the handler raises; what it wrote is rolled back.
        """
        handling = self._handling(event, sender)
        handling.refuse_transaction(self.name)
        return handling.run(visibly=redelivered)

    async def ahandle(
        self, event: Event, *, sender: str = "", redelivered: bool = False
    ) -> Handled | Duplicate:
        """:meth:`handle` in an event loop, for async handlers and others.

        No transaction can span a coroutine function: an async handler runs in the leased mode.
        """
        if not iscoroutinefunction(self._handler(event)):
            return await sync_to_async(self.handle)(event, sender=sender, redelivered=redelivered)
        handling = self._handling(event, sender, asynchronous=True)
        return await handling.arun()

    def handle_many(
        self, events: Sequence[Event], *, sender: str = "", redelivered: bool = False
    ) -> list[Outcome]:
        """Handle events in their order, in one transaction if none of them fails.

        If one fails, all are rolled back. Those before it are handled together, it is handled
        alone, and those after it follow together: nobody's failure undoes a neighbour. A store
        without transactions, and the leased mode, handle one after the other.

        Args:
            events: the events, of which some may be the same.
            sender: who sent all of them; for a federated consumer.
            redelivered: as for :meth:`handle`. Each event is then handled alone.

        Returns:
            What became of each event, in their order: :class:`~.outcomes.Handled`,
            :class:`~.outcomes.Duplicate`, or :class:`~.outcomes.Failed` with the error that
            :meth:`handle` would have raised.

        Raises:
            ImproperlyConfigured: as for :meth:`handle`.
        """
        planned = [self._planned(event, sender) for event in events]
        handlings = [each for each in planned if isinstance(each, Handling)]
        for handling in handlings[:1]:  # they have one store
            handling.refuse_transaction(self.name)
        outcomes = iter((alone if redelivered else together)(handlings))
        return [each if isinstance(each, Failed) else next(outcomes) for each in planned]

    def refuse_unready(self) -> None:
        """Refuse to begin, where :meth:`handle` could not handle events of each of its types.

        Raises:
            ImproperlyConfigured: a handler is async, or the policy needs what its store or mode
                cannot promise.
        """
        for kind, handler in self._handlers.items():
            self._refuse_async(kind, handler)
        policy = self._policy.resolved()
        lease_of(policy, stores[policy.store])

    def record_of(self, event: Event, *, sender: str = "") -> RecordOf:
        """Where the record of the event is, or would be; ``ValueError``: the sender is missing."""
        scope = scope_of(self.name, event.source, sender, federated=self.federated)
        store = stores[self._policy.resolved().store]
        return RecordOf.named(store, keys.fit(event.id), scope, _content(event))

    def _planned(self, event: Event, sender: str) -> Handling | Failed:
        try:
            return self._handling(event, sender)
        except (UnknownEventType, TypeError) as error:
            return Failed(error)

    def _handling(self, event: Event, sender: str, *, asynchronous: bool = False) -> Handling:
        handler = self._handler(event)
        if not asynchronous:
            self._refuse_async(event.type, handler)
        plan = plan_call(
            self._policy.resolved(),
            key=keys.fit(event.id),
            scope=scope_of(self.name, event.source, sender, federated=self.federated),
            name=f"{self.name} {event.type}",
            content=_content(event),
            method=METHOD,
            asynchronous=asynchronous,
            max_attempts=self.max_attempts,
            caused_by="" if self.federated else event.caused_by,
        )
        if sender:  # for the handler, and for the audit
            plan = replace(plan, operation=replace(plan.operation, principal=sender))
        return Handling(plan, event, handler, self.seen)

    def _refuse_async(self, kind: str, handler: Handler) -> None:
        if iscoroutinefunction(handler):
            raise ImproperlyConfigured(
                f"The handler of {kind!r} in the consumer {self.name!r} is async. Call ahandle(), "
                "or make it a plain function."
            )

    def _handler(self, event: Event) -> Handler:
        if not isinstance(event, Event):
            raise TypeError(
                f"The consumer {self.name!r} was given a {type(event).__name__}. Make it an Event, "
                "for example by Event.from_json()."
            )
        handler = self._handlers.get(event.type)
        if handler is None:
            known = ", ".join(sorted(self._handlers)) or "none"
            raise UnknownEventType(
                f"The consumer {self.name!r} has no handler for events of the type {event.type!r}; "
                f"it handles {known}. Nothing was executed and nothing is recorded: register a "
                "handler with Consumer.on(), and deliver the event again."
            )
        return handler


def _content(event: Event) -> str:
    """The digest of what tells two events apart that have one source and id."""
    return content_digest(canonical((event.type, event.subject, event.data)))
