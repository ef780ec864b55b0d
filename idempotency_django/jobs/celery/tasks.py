"""The base class of Celery tasks whose messages may be delivered more than once."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, ClassVar, Final

from celery import Celery, Task
from celery.exceptions import Ignore
from django.core.exceptions import ImproperlyConfigured

from ...engine.context import ExecutionContext
from ...errors import ClaimLost, OperationInProgress, ResponseNotStored, StoreUnavailable
from ...functions import run_plan
from ...planning import Plan, plan_call
from ...policy import PROJECT_POLICY, UNSET, Policy, keys
from ...policy.canonical import canonical, content_digest
from ...records import reference
from ..arguments import KeyRule, check_rule, fingerprint_of, key_of
from .copies import send_copy
from .deliveries import Delivery
from .enqueueing import enqueued
from .replacements import name_replacement, names_of
from .results import Ignored, packed, unpacked

METHOD: Final = "TASK"
"""What stands for the HTTP method in the audit."""

_LATER: Final = (OperationInProgress, StoreUnavailable, ClaimLost)
"""What says nothing of the task's result: its message is to be looked at again."""


class IdempotentTask(Task):  # type: ignore[type-arg]  # generic in its stubs only
    """A task that has its effect once, however often its message is delivered.

    ::

        @app.task(base=IdempotentTask, bind=True, idempotency=Policy(mode="leased"))
        def pay(self, order_id):
            key = self.execution.derive_key("charge")
            return self.execution.step("charge", provider.charge, order_id, idempotency_key=key)

    ``@shared_task(base=IdempotentTask)`` and ``Celery(task_cls=IdempotentTask)`` do the same.
    Celery's own tasks (``celery.*``) are left alone.

    A delivery that finds the task completed returns the first result. A delivery that finds it in
    progress sends the message once more, with the same id and for a later time, and is then
    acknowledged: the task is resumed if its worker has died, and none of its retries is used up.

    An exception of the task frees its key, ``Retry`` and ``Reject`` included. What Celery does
    about the exception is unchanged. ``Ignore`` ends the task, and each later delivery raises it
    again.

    Attributes:
        idempotency: the policy; ``None``: the project's.
        key: the operation that a call names: a template of its arguments such as
            ``"order-{order_id}"``, or a callable that takes the same arguments, without ``self``,
            and returns a text, a number or a UUID. ``None``: the task's id, which stays the same
            when its message is delivered again and when it retries.
        max_attempts: how many attempts may fail or be interrupted before the task is held for an
            operator; ``None``: any number.
        acks_late: ``True`` here, or a task whose worker dies would be lost.
        reject_on_worker_lost: likewise for a task whose process is killed, and not its worker.

    Raises:
        OperationInProgress: only where there is no message to send again: the task was called as a
            function, or eagerly.
        OperationHeld: it was interrupted or failed too often: an operator must settle it.
        FingerprintMismatch: its key was used with other arguments.
        ResponseNotStored: it was executed, but its result was kept neither here nor by Celery.
        TypeError: an argument is not plain data, or the result is not JSON.
    """

    abstract = True
    acks_late = True
    reject_on_worker_lost = True

    idempotency: ClassVar[Policy | None] = None
    key: ClassVar[KeyRule | None] = None
    max_attempts: ClassVar[int | None] = None

    run: Callable[..., Any]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if isinstance(vars(cls).get("key"), FunctionType):
            cls.key = staticmethod(vars(cls)["key"])  # it does not take the task

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Check what the task declares, as soon as its app knows it.

        Raises:
            ImproperlyConfigured: the template names what is not an argument of the task, or the
                policy is none, or one that checks the caller of an HTTP request.
        """
        super().on_bound(app)
        if cls.key is not None:
            check_rule(cls.key, f"the task {cls.name}", cls.run)
        if cls.idempotency is None:
            return
        if not isinstance(cls.idempotency, Policy):
            raise ImproperlyConfigured(
                f"idempotency= of the task {cls.name} is a {type(cls.idempotency).__name__}; it "
                "must be a Policy."
            )
        if cls.idempotency.check_replay not in (UNSET, None):
            raise ImproperlyConfigured(
                f"The policy of the task {cls.name} has check_replay=, which checks the caller of "
                "an HTTP request. A task has none. Remove it."
            )

    def enqueue_once(self, *args: Any, **kwargs: Any) -> str:
        """Send the task if, and only if, the transaction is committed. ::

            with transaction.atomic():
                order = Order.objects.create(amount=500)
                pay.enqueue_once(order.pk)

        The message is written into the outbox beside the change, and a relay gives it to Celery's
        broker. A task with a ``key`` is written once: within the policy's ``ttl`` (30 days at
        most), a further call with the same key and arguments writes nothing, unless the task that
        was sent has failed or was interrupted. A task whose key is completed returns the first
        result.

        Args:
            args: the task's positional arguments, as for ``delay()``.
            kwargs: the task's keyword arguments.

        Returns:
            The task's id. The result is not there before the commit, so do not wait for it.

        Raises:
            ImproperlyConfigured: no transaction is open on the database of the outbox, or the app
                ``idempotency_django.messaging`` is not installed.
            TypeError: an argument is not plain data, or nothing that Celery's JSON can hold, or a
                dict of ``__type__`` and ``__value__``, which it reads as another type.
        """
        if self.key is not None:
            return enqueued(self.name, args, kwargs, self._plan(args, kwargs))
        fingerprint_of(f"the task {self.name}", self.run, args, kwargs)  # now, not in the worker
        return enqueued(self.name, args, kwargs, None)

    @property
    def execution(self) -> ExecutionContext:
        """What the task can use of the operation that it executes: its attempt, keys and steps.

        Raises:
            ImproperlyConfigured: the task is not being executed under a key.
        """
        execution = getattr(self.request, "idempotency", None)
        if not isinstance(execution, ExecutionContext):
            raise ImproperlyConfigured(
                f"The task {self.name} has no execution here: it was called as a function, so it "
                "has no id that would name its operation. Use apply(), or give the task a key=."
            )
        return execution

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        request: Any = self.request_stack.top
        called = request is None or request.called_directly or request._protected
        if self.name.startswith("celery.") or (called and self.key is None):
            return super().__call__(*args, **kwargs)
        if called:
            return self._called(args, kwargs)
        request._protected = 1  # as Celery marks it: another call during this one is a function's
        return self._delivered(Delivery(self, request), args, kwargs)

    def _called(self, args: Any, kwargs: Any) -> Any:
        """The result of a call as a function, which has no message and is named by its key."""

        def execute(execution: ExecutionContext) -> Any:
            self.push_request(args=args, kwargs=kwargs, idempotency=execution)
            try:
                return packed(self.name, self.run(*args, **kwargs))
            finally:
                self.pop_request()

        plan = self._plan(args, kwargs)
        return unpacked(run_plan(plan, execute).result)

    def _delivered(self, delivery: Delivery, args: Any, kwargs: Any) -> Any:
        """The result of a message."""
        raised: list[Exception] = []

        def execute(execution: ExecutionContext) -> Any:
            delivery.request.idempotency = execution
            try:
                return packed(self.name, self.run(*args, **kwargs))
            except Ignore as ignore:
                return Ignored(str(ignore)).packed()
            except Exception as error:
                raised.append(error)  # whatever it is, it is the task's own
                raise

        if delivery.has_failed():
            raise Ignore("This delivery's task has failed, and was reported as failed.")
        plan = self._plan(args, kwargs, delivery)
        try:
            outcome = run_plan(plan, execute)
        except _LATER as error:
            if error in raised or delivery.request.is_eager:
                raise
            send_copy(delivery, plan, error)
            raise Ignore(f"It is looked at again later: {error}") from None
        except ResponseNotStored as error:
            if error in raised:
                raise
            return delivery.kept_result(error)
        if outcome.replayed:
            delivery.skip_what_was_sent()
        delivery.name_successors(reference(plan.operation.key, plan.operation.scope))
        return unpacked(outcome.result)

    def on_replace(self, sig: Any) -> Any:
        """Called by Celery with what replaces the task, which is an operation of its own.

        Args:
            sig: the signature that is sent.
        """
        request: Any = self.request
        if not request.called_directly:
            name_replacement(
                sig, self.name, self._key(request, request.args, request.kwargs), request
            )
        return super().on_replace(sig)

    def _key(self, request: Any, args: Any, kwargs: Any) -> str:
        """The key of a call or a message, whatever it replaces."""
        if self.key is not None:
            return key_of(self.key, f"the task {self.name}", self.run, args, kwargs)
        return keys.fit(request.id)

    def _plan(self, args: Any, kwargs: Any, delivery: Delivery | None = None) -> Plan:
        request = delivery.request if delivery else None
        arguments = fingerprint_of(f"the task {self.name}", self.run, args, kwargs)
        key, scope = names_of(self.name, self._key(request, args, kwargs), request)
        return plan_call(
            (self.idempotency or PROJECT_POLICY).resolved(),
            key=key,
            scope=scope,
            name=self.name,
            content=content_digest(canonical((self.name, arguments))),
            method=METHOD,
            max_attempts=self.max_attempts,
            caused_by=delivery.caused_by if delivery else "",
        )
