"""Celery tasks: a message that the broker delivers twice has its effect once.

This package imports Celery, so the extra ``celery`` must be installed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import FunctionType
from typing import Any, ClassVar, Final

from celery import Celery, Task, current_task, states
from celery.backends.base import BaseKeyValueStoreBackend
from celery.exceptions import Ignore, Reject
from celery.signals import before_task_publish
from django.core.exceptions import ImproperlyConfigured
from kombu.exceptions import OperationalError
from kombu.utils.json import dumps, loads

from ..conf import conf
from ..engine.context import ExecutionContext, current_execution
from ..errors import (
    ClaimLost,
    IdempotencyError,
    OperationInProgress,
    ResponseNotStored,
    StoreUnavailable,
)
from ..functions import idempotent_call, run_plan
from ..planning import Plan, plan_call
from ..policy import PROJECT_POLICY, UNSET, Policy, keys, scopes
from ..policy.canonical import canonical, content_digest
from ..records import Status, derived_key, reference
from .functions import KeyRule, check_rule, enqueue, fingerprint_of, key_of

__all__ = ["IdempotentTask"]

CAUSED_BY: Final = "idempotency_caused_by"
"""The header: the reference of the record of the operation that sent the message."""


def name_parent(*, headers: dict[str, Any], **_: Any) -> None:
    """Tell a message which operation sends it. A task that sends itself again has no new parent."""
    execution = current_execution()
    if execution is None or CAUSED_BY in headers:
        return
    if current_task and _is_again(headers, current_task.request):
        return
    headers[CAUSED_BY] = execution.reference


def _is_again(headers: Mapping[str, Any], request: Any) -> bool:
    nesting = headers.get("replaced_task_nesting")  # more: it is what replaces the task
    return bool(request.id == headers.get("id") and request.replaced_task_nesting == nesting)


# Of each message that this process sends: an HTTP request's, too.
before_task_publish.connect(name_parent, dispatch_uid=f"{__name__}.parent")


def with_parent(options: Mapping[str, Any], reference: str) -> dict[str, Any]:
    """The options of a task that Celery sends later, with the operation that it comes from."""
    return {**options, "headers": {CAUSED_BY: reference, **(options.get("headers") or {})}}


COPIES: Final = "idempotency_copies"
"""The header of a copy: how many were sent one after the other, this one included."""


class Delivery:
    """A delivery.

    Args:
        task: the task.
        request: its request, as Celery keeps it while the task runs.
    """

    def __init__(self, task: Any, request: Any) -> None:
        self.task = task
        self.request = request

    @property
    def copies(self) -> int:
        """How many copies were sent one after the other before this delivery; 0: it is no copy."""
        return int(self.request.get(COPIES) or 0)

    @property
    def caused_by(self) -> str:
        """The reference of the record of the operation that sent the message; empty: of none."""
        headers = self.request.headers or {}  # there only, where the task is eager
        return str(self.request.get(CAUSED_BY) or headers.get(CAUSED_BY) or "")

    def has_failed(self) -> bool:
        """Whether an earlier delivery of the message ended in a failure that Celery has recorded.

        Somebody may send a failed task again with its id; but what the broker delivers again, or
        was sent for the case that a worker dies, has been reported.
        """
        again = self.copies or (self.request.delivery_info or {}).get("redelivered")
        return bool(again) and self._state() == states.FAILURE

    def name_successors(self, reference: str) -> None:
        """Tell what Celery sends after the task where it comes from, and give it a lasting id.

        A worker that dies while it sends the callbacks leaves it to the next one to send them
        again. A callback that is an :class:`IdempotentTask` then has its effect once. The tasks of
        a chain have their ids from its beginning.

        Args:
            reference: of the task's record.
        """
        request = self.request
        links = enumerate(request.callbacks or ())
        request.callbacks = [self._named(link, reference, place) for place, link in links] or None
        if request.chain:
            *others, following = request.chain  # Celery takes them from the end
            request.chain = [*others, _caused(following, reference)]

    def _named(self, link: Mapping[str, Any], reference: str, place: int) -> Mapping[str, Any]:
        caused = _caused(link, reference)
        if link.get("subtask_type") or caused["options"].get("task_id"):
            return caused
        name = derived_key(scope="celery.link", key=self.request.id, content="", name=str(place))
        return {**caused, "options": {**caused["options"], "task_id": name}}

    def skip_what_was_sent(self) -> None:
        """Leave out of a replay what Celery has sent already: callbacks, and the chain's next task.

        It sends them before it stores the result. Where it counts the parts of a chord one by one,
        a part whose result is stored has been counted.
        """
        if self._state() != states.SUCCESS:
            return
        self.request.callbacks = self.request.chain = None
        if counts_parts(self.task.backend):
            self.request.chord = None

    def kept_result(self, error: Exception) -> Any:
        """The result as Celery has it, where our own record holds none.

        Raises:
            ResponseNotStored: Celery has none either.
        """
        if self.request.ignore_result or self.task.ignore_result:
            return None
        if self._state() != states.SUCCESS:
            raise error
        self.skip_what_was_sent()
        return self.task.backend.get_result(self.request.id)

    def _state(self) -> str:
        if self.request.is_eager:
            return states.PENDING
        return str(self.task.backend.get_state(self.request.id))


def _caused(successor: Mapping[str, Any], reference: str) -> dict[str, Any]:
    return {**successor, "options": with_parent(successor.get("options") or {}, reference)}


def counts_parts(backend: Any) -> bool:
    """Whether a result backend counts the parts of a chord without noting which were counted."""
    counting = BaseKeyValueStoreBackend.on_chord_part_return
    if getattr(type(backend), "on_chord_part_return", None) is counting:
        return bool(backend.implements_incr)
    return type(backend).__module__.startswith("django_celery_results.")


SLACK: Final = 0.2
"""Seconds after the end of a lease, by another machine's clock, at which its task is free."""

VISIBILITY_TIMEOUT: Final = 1800.0
"""Seconds after which Celery's brokers deliver again what nobody acknowledged, at the earliest."""

_MEMORY: Final = timedelta(hours=1)


def send_copy(delivery: Delivery, plan: Plan, reason: IdempotencyError) -> None:
    """Send the message once more for a later time, unless another delivery of it has done so.

    Each copy is numbered, and of each number one is sent. So the copies of a message form one
    chain, however often the broker delivers a message or a copy again.

    Raises:
        Reject: the broker takes no message; it is to deliver this one again.
    """
    number = delivery.copies + 1
    pause = _pause(delivery, plan, reason, number)
    send = partial(_send, delivery, pause, number)
    if isinstance(reason, StoreUnavailable):
        send()
        return
    request = delivery.request
    turn = str(request.retries)
    if request.replaced_task_nesting:  # the id is that of what the task replaces
        turn += f".{request.replaced_task_nesting}"
    policy = Policy(
        store=plan.policy.store,
        mode=plan.policy.mode,
        on_conflict="reject",
        on_interrupted="resume",
        ttl=_MEMORY + plan.policy.lease,
    )
    try:
        idempotent_call(
            send,
            key=keys.fit(f"{request.id}:{turn}:{number}"),
            scope=scopes.fit(f"copies:{delivery.task.name}"),
            name=f"copy of {delivery.task.name}",
            policy=policy,
        )
    except IdempotencyError:
        send()  # nobody knows whether it was sent: better twice


def _send(delivery: Delivery, pause: float, number: int, _: ExecutionContext | None = None) -> None:
    task, request = delivery.task, delivery.request
    options: dict[str, Any] = {
        "countdown": pause,
        "expires": None,  # the task was begun in time
        "headers": {**(request.headers or {}), COPIES: number},
        "argsrepr": request.get("argsrepr"),
        "kwargsrepr": request.get("kwargsrepr"),
    }
    copy = task.signature_from_request(request, **options)
    task.push_request()  # so that the copy has the parent of the message, and is not its child
    try:
        copy.apply_async()
    except OperationalError as error:
        if not task.acks_late:
            raise
        raise Reject(error, requeue=True) from error
    finally:
        task.pop_request()


def _pause(delivery: Delivery, plan: Plan, reason: IdempotencyError, number: int) -> float:
    """Seconds until the copy is looked at.

    The broker delivers a message again that a worker has kept for too long, so it is kept for half
    of that time at most.
    """
    remaining = reason.remaining if isinstance(reason, OperationInProgress) else None
    if remaining:
        pause = remaining + SLACK
    else:  # nobody knows: twice as long each time, up to a lease
        first = conf.retry_after.total_seconds() or SLACK
        longest = max(first, plan.policy.lease.total_seconds())
        pause = min(first * 2 ** min(number - 1, 16), longest)
    options = delivery.task.app.conf.broker_transport_options or {}
    visible = float(options.get("visibility_timeout") or VISIBILITY_TIMEOUT)
    return min(pause, visible / 2)


REPLACED: Final = "idempotency_replaced"
"""The header of what replaces a task: how often each operation was replaced before, by digest."""

_REMEMBERED: Final = 500
"""Operations in the header, or a task that replaces itself for ever under new keys would send
messages that no broker takes."""


def names_of(task: str, key: str, request: Any) -> tuple[str, str]:
    """The key and the scope of an operation.

    A replacement has the id of what it replaces, and often its name and key. Its message tells how
    often the operation was replaced before, and still does when it is delivered again.

    Args:
        task: the task's name.
        key: its id, or what its ``key`` makes of the arguments.
        request: of its message; ``None``: it is called as a function.
    """
    times = _replaced(request).get(_digest(task, key)) if request else None
    if not times:
        return key, scopes.fit(f"task:{task}")
    return keys.fit(f"{key}:{times}"), scopes.fit(f"replacement:{task}")


def name_replacement(signature: Any, task: str, key: str, request: Any) -> None:
    """Tell what replaces an operation that it does so.

    Args:
        signature: is sent, with the id that the task has.
        task: the name of the task that is replaced.
        key: as in :func:`names_of`.
        request: of the message of the task that is replaced.
    """
    replaced, name = _replaced(request), _digest(task, key)
    times = replaced.pop(name, 0) + 1
    latest = dict([*replaced.items(), (name, times)][-_REMEMBERED:])
    for leaf in _leaves(signature):
        options = leaf["options"]
        options["headers"] = {**(options.get("headers") or {}), REPLACED: latest}


def pass_on(*, headers: dict[str, Any], **_: Any) -> None:
    """Keep what a message tells where one of Celery's own tasks replaces or repeats itself."""
    if not current_task or current_task.request.id != headers.get("id"):
        return
    if replaced := _replaced(current_task.request):
        headers.setdefault(REPLACED, replaced)


before_task_publish.connect(pass_on, dispatch_uid=f"{__name__}.replacement")


def _replaced(request: Any) -> dict[str, int]:
    headers = request.headers or {}  # there only, where the task is eager
    return dict(request.get(REPLACED) or headers.get(REPLACED) or {})


def _digest(task: str, key: str) -> str:
    return content_digest(task, key)


def _leaves(signature: Mapping[str, Any]) -> Iterator[Any]:
    """The tasks of a chain, a group or a chord; of others, themselves."""
    if signature.get("subtask_type") not in ("chain", "group", "chord"):
        yield signature
        return
    for name in ("tasks", "header", "body"):
        parts = signature["kwargs"].get(name) or ()
        for part in (parts,) if isinstance(parts, Mapping) else parts:
            yield from _leaves(part)


_IGNORED: Final = "celery.Ignore"


@dataclass(frozen=True, slots=True)
class Ignored:
    """The end of a task that raised ``Ignore``, for its reason."""

    reason: str

    def packed(self) -> dict[str, str]:
        """As it is stored."""
        return {"__type__": _IGNORED, "__value__": self.reason}


def packed(task: str, result: Any) -> Any:
    """The result as plain JSON. What Celery's JSON can hold keeps its type: dates, UUIDs, decimals.

    Raises:
        TypeError: it is nothing that Celery's JSON can hold.
    """
    try:
        return json.loads(dumps(result))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"The result of the task {task} is not JSON, so that a retry could not be given it: "
            f"{error}. Return plain data, for example a primary key."
        ) from error


def unpacked(stored: Any) -> Any:
    """The result, each time as it was returned first.

    Raises:
        Ignore: the task did.
    """
    if isinstance(stored, dict) and stored.get("__type__") == _IGNORED:
        raise Ignore(stored["__value__"])
    return loads(json.dumps(stored))


LONGEST_WINDOW: Final = timedelta(days=30)
"""For how long the outbox keeps a message at most, so that its task is not enqueued again."""

_MARKS: Final = {"__type__", "__value__"}
"""The keys of what Celery's JSON makes of a value that JSON has no type for."""


def enqueued(task: str, args: Sequence[Any], kwargs: Mapping[str, Any], plan: Plan | None) -> str:
    """Write the message of a task; the id that the task will have.

    Args:
        task: its name.
        args: positional arguments.
        kwargs: keyword arguments.
        plan: of the operation that its key names; ``None``: it has no key.

    Raises:
        ImproperlyConfigured: there is no outbox, or no transaction.
        TypeError: Celery's JSON cannot hold an argument, or would make another one of it.
    """
    write = enqueue()
    try:
        plain_args, plain_kwargs = json.loads(dumps(args)), json.loads(dumps(kwargs))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"An argument of the task {task} is not JSON, so the outbox cannot keep it: {error}. "
            "Pass plain data, for example a primary key."
        ) from error
    _refuse_marks(task, [args, kwargs])  # nothing in them contains itself: JSON would refuse that
    if plan is None:
        return write(
            task, plain_args, plain_kwargs, dedup_id=None, window=None, unfinished=lambda: False
        )
    operation = plan.operation

    def unfinished() -> bool:
        record = plan.store.get(operation.key, operation.scope)
        # One that is held waits for an operator, whatever is sent.
        return (
            record is not None
            and not record.held
            and (record.status is Status.FAILED or record.interrupted)
        )

    # With what is asked for: other arguments under the key are for the task to refuse.
    dedup_id = f"{operation.key} {operation.content}"
    window = min(operation.ttl or LONGEST_WINDOW, LONGEST_WINDOW)
    return write(
        task, plain_args, plain_kwargs, dedup_id=dedup_id, window=window, unfinished=unfinished
    )


def _refuse_marks(task: str, arguments: Any) -> None:
    """Refuse a dict that Celery's JSON would read as a date or the like: a client can send one."""
    pending = [arguments]
    while pending:
        match pending.pop():
            case Mapping() as item:
                if item.keys() == _MARKS:
                    raise TypeError(
                        f"An argument of the task {task} has a dict of __type__ and __value__, "
                        "which Celery's JSON reads as a value of another type. Pass what a client "
                        "has sent as a text."
                    )
                pending += item.values()
            case list() | tuple() as item:
                pending += item


METHOD: Final = "TASK"
"""What stands for the HTTP method in the audit."""

_LATER: Final = (OperationInProgress, StoreUnavailable, ClaimLost)
"""What says nothing of the task's result: its message is to be looked at again."""


class IdempotentTask(Task):  # type: ignore[type-arg]  # generic in its stubs only
    """A task that has its effect once, however often its message is delivered.

    ::

        @app.task(base=IdempotentTask, bind=True, idempotency_policy=Policy(mode="leased"))
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
        idempotency_policy: the policy; ``None``: the project's.
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

    idempotency_policy: ClassVar[Policy | None] = None
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
        if cls.idempotency_policy is None:
            return
        if not isinstance(cls.idempotency_policy, Policy):
            raise ImproperlyConfigured(
                f"idempotency_policy= of the task {cls.name} is a "
                f"{type(cls.idempotency_policy).__name__}; it "
                "must be a Policy."
            )
        if cls.idempotency_policy.check_replay not in (UNSET, None):
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
            (self.idempotency_policy or PROJECT_POLICY).resolved(),
            key=key,
            scope=scope,
            name=self.name,
            content=content_digest(canonical((self.name, arguments))),
            method=METHOD,
            max_attempts=self.max_attempts,
            caused_by=delivery.caused_by if delivery else "",
        )
