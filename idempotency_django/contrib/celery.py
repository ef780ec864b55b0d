"""Celery tasks: a message that the broker delivers twice has its effect once.

This package imports Celery, so the extra ``celery`` must be installed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from types import FunctionType
from typing import Any, ClassVar, Final

from celery import Celery, Task, current_task, states
from celery.backends.base import BaseKeyValueStoreBackend
from celery.exceptions import Ignore, Reject
from celery.signals import before_task_publish
from celery.worker.request import Request
from django.core.exceptions import ImproperlyConfigured
from kombu.exceptions import OperationalError
from kombu.utils.json import dumps

from ..backoff import Backoff
from ..conf import conf
from ..engine import ExecutionContext, Plan, current_execution, idempotent_call, plan_call, run_plan
from ..errors import (
    ClaimLost,
    IdempotencyError,
    KeyExpired,
    OperationInProgress,
    ResponseNotStored,
    StoreUnavailable,
)
from ..policy import PROJECT_POLICY, UNSET, Policy, canonical, digest, keys, scopes
from ..stores import Status, derived_key, reference
from .jobs import KeyRule, check_rule, enqueue, fingerprint_of, key_of

__all__ = ["IdempotentTask"]

METHOD: Final = "TASK"
"""The value in place of the HTTP method in the audit."""

CAUSED_BY: Final = "idempotency_caused_by"
"""The header: the reference of the record of the operation that sent the message."""

COPIES: Final = "idempotency_copies"
"""The header of a copy: how many were sent one after the other, this one included."""

REPLACED: Final = "idempotency_replaced"
"""The header of a task's replacement: the number of earlier replacements, by the operation's
digest.
"""

_MOST_REPLACED: Final = 500
"""Operations in the header, or a task that replaces itself forever with new keys would send
messages that no broker takes."""

_LATER: Final = (OperationInProgress, StoreUnavailable, ClaimLost)
"""Errors that do not describe the task's result: its message is delivered again."""

_SLACK: Final = 0.2
"""Seconds after the end of a lease, by another machine's clock, at which its task is free."""

_VISIBILITY_TIMEOUT: Final = 1800.0
"""Seconds after which Celery's brokers deliver an unacknowledged message again, at the earliest."""

_COPY_TTL: Final = timedelta(hours=1)
"""How long the key of a sent copy is kept, in addition to the lease."""

_LONGEST_WINDOW: Final = timedelta(days=30)
"""The longest time for which the outbox keeps a message, so that its task is not enqueued again."""

_IGNORED: Final = "celery.Ignore"
"""The type of the stored result of a task that raised ``Ignore``."""

_MARKS: Final = {"__type__", "__value__"}
"""The keys by which Celery's JSON encodes a value without a JSON type."""


class LastingRequest(Request):
    """A message that the broker delivers again whenever the process that had it is lost.

    Since 5.7, Celery acknowledges it once the result is stored. But the process may have died
    before it counted the part of a chord, or sent the chord's body.
    """

    def _success_was_stored(self) -> Any:
        if self.task.acks_late and self.task.reject_on_worker_lost:
            return False
        return super()._success_was_stored()  # type: ignore[misc]  # not in the stubs


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
    Request = LastingRequest  # type: ignore[assignment]  # a name only, in the stubs

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
                ``idempotency_django.contrib.messaging`` is not installed.
            TypeError: an argument is not plain data, or nothing that Celery's JSON can hold, or a
                dict of ``__type__`` and ``__value__``, which it reads as another type.
        """
        task = self.name
        if self.key is not None:
            plan: Plan | None = self._plan(args, kwargs)
        else:
            plan = None
            fingerprint_of(f"the task {task}", self.run, args, kwargs)  # now, not in the worker
        write = enqueue()
        try:
            plain = json.loads(dumps([args, kwargs]))
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"An argument of the task {task} is not JSON, so the outbox cannot store it: "
                f"{error}. Pass plain data, for example a primary key."
            ) from error
        _refuse_marks(task, [args, kwargs])  # nothing in them contains itself: JSON refuses that
        if plan is None:
            return write(task, *plain, dedup_id=None, window=None, unfinished=lambda: False)
        operation = plan.operation
        return write(
            task,
            *plain,
            # With what is asked for: other arguments under the key are for the task to refuse.
            dedup_id=f"{operation.key} {operation.fingerprint}",
            window=min(operation.ttl or _LONGEST_WINDOW, _LONGEST_WINDOW),
            unfinished=partial(_is_unfinished, plan),
        )

    @property
    def execution(self) -> ExecutionContext:
        """The context of the operation that the task executes, with its attempt, keys and steps.

        Raises:
            ImproperlyConfigured: the task is not being executed under a key.
        """
        execution = getattr(self.request, "idempotency", None)
        if not isinstance(execution, ExecutionContext):
            raise ImproperlyConfigured(
                f"The task {self.name} has no execution here: it was called as a function, so it "
                "has no task id to identify its operation. Use apply(), or give the task a key=."
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
        return self._delivered(_Delivery(self, request), args, kwargs)

    def _called(self, args: Any, kwargs: Any) -> Any:
        """The result of a call as a function, which has no message and is named by its key."""

        def execute(execution: ExecutionContext) -> Any:
            self.push_request(args=args, kwargs=kwargs, idempotency=execution)
            try:
                return self.run(*args, **kwargs)
            finally:
                self.pop_request()

        return _unpack(run_plan(self._plan(args, kwargs), execute).result)

    def _delivered(self, delivery: _Delivery, args: Any, kwargs: Any) -> Any:
        """The result of a message."""
        raised: list[Exception] = []

        def execute(execution: ExecutionContext) -> Any:
            delivery.request.idempotency = execution
            try:
                return self.run(*args, **kwargs)
            except Ignore as ignore:
                return {"__type__": _IGNORED, "__value__": str(ignore)}
            except Exception as error:
                raised.append(error)  # any error is the task's own
                raise

        if delivery.has_failed():
            raise Ignore("This delivery's task has failed, and was reported as failed.")
        plan = self._plan(args, kwargs, delivery.request)
        try:
            try:
                outcome = run_plan(plan, execute)
                result = _unpack(outcome.result)
                replayed = outcome.replayed
            except (KeyExpired, ResponseNotStored) as error:
                if error in raised:
                    raise
                result, replayed = delivery.kept_result(error), True
            if replayed:
                delivery.skip_what_was_sent()
        except _LATER as error:
            if error in raised or delivery.request.is_eager:
                raise
            delivery.send_copy(plan, error)
            raise Ignore(f"It is retried later: {error}") from None
        delivery.name_successors(reference(plan.operation.key, plan.operation.scope))
        return result

    def on_replace(self, sig: Any) -> Any:
        """Called by Celery with what replaces the task, which is an operation of its own.

        Its message has the id of this one. It says how often each operation was replaced before.

        Args:
            sig: the signature that is sent.
        """
        request: Any = self.request
        if not request.called_directly:
            key = self._key(request.id, request.args, request.kwargs)
            replaced, name = _replaced(request), digest(self.name, key)
            times = replaced.pop(name, 0) + 1
            latest = dict([*replaced.items(), (name, times)][-_MOST_REPLACED:])
            for leaf in _leaves(sig):
                headers = leaf["options"].get("headers") or {}
                leaf["options"]["headers"] = {**headers, REPLACED: latest}
        return super().on_replace(sig)

    def _key(self, task_id: str, args: Any, kwargs: Any) -> str:
        """The key of a call or a message."""
        if self.key is not None:
            return key_of(self.key, f"the task {self.name}", self.run, args, kwargs)
        return keys.fit(task_id)

    def _plan(self, args: Any, kwargs: Any, request: Any = None) -> Plan:
        """The plan of a message, or of a call as a function."""
        arguments = fingerprint_of(f"the task {self.name}", self.run, args, kwargs)
        key, scope = self._key(request.id if request else "", args, kwargs), f"task:{self.name}"
        # A replacement has the id of what it replaces, and often its name and key.
        if request and (times := _replaced(request).get(digest(self.name, key))):
            key, scope = keys.fit(f"{key}:{times}"), f"replacement:{self.name}"
        return plan_call(
            (self.idempotency_policy or PROJECT_POLICY).resolved(),
            key=key,
            scope=scopes.fit(scope),
            name=self.name,
            content_digest=digest(canonical((self.name, arguments))),
            method=METHOD,
            max_attempts=self.max_attempts,
            caused_by=str(_header(request, CAUSED_BY) or "") if request else "",
        )


def _is_unfinished(plan: Plan) -> bool:
    """Whether the operation of a task that was sent has ended without success."""
    record = plan.store.get(plan.operation.key, plan.operation.scope)
    if record is None or record.held:  # one that is held waits for an operator, whatever is sent
        return False
    return record.status is Status.FAILED or record.interrupted


def _refuse_marks(task: str, arguments: Any) -> None:
    """Refuse a dict that Celery's JSON would read as a date or the like: a client can send one."""
    pending = [arguments]
    while pending:
        match pending.pop():
            case Mapping() as item:
                if item.keys() == _MARKS:
                    raise TypeError(
                        f"An argument of the task {task} has a dict with the keys __type__ and "
                        "__value__, which Celery's JSON decodes as another type. Pass a client's "
                        "data as a string."
                    )
                pending += item.values()
            case list() | tuple() as item:
                pending += item


def _unpack(stored: Any) -> Any:
    """The result of the task.

    Raises:
        Ignore: the task did.
    """
    if isinstance(stored, dict) and stored.get("__type__") == _IGNORED:
        raise Ignore(stored["__value__"])
    return stored


def _header(request: Any, name: str) -> Any:
    """A header of a message; ``None``: it has none of that name."""
    headers = request.headers or {}  # there only, where the task is eager
    return request.get(name) or headers.get(name)


def _replaced(request: Any) -> dict[str, int]:
    return dict(_header(request, REPLACED) or {})


def _leaves(signature: Mapping[str, Any]) -> Iterator[Any]:
    """The tasks of a chain, a group or a chord; of others, themselves."""
    if signature.get("subtask_type") not in ("chain", "group", "chord"):
        yield signature
        return
    for name in ("tasks", "header", "body"):
        parts = signature["kwargs"].get(name) or ()
        for part in (parts,) if isinstance(parts, Mapping) else parts:
            yield from _leaves(part)


def add_headers(*, headers: dict[str, Any], **_: Any) -> None:
    """Tell a message which operation sends it, and keep what it tells of replaced operations.

    A task that sends itself again, as by ``retry()``, has no new parent.
    """
    request: Any = current_task.request if current_task else None
    again = request is not None and request.id == headers.get("id")
    if again and (replaced := _replaced(request)):
        headers.setdefault(REPLACED, replaced)
    # With more nesting, it is what replaces the task.
    again = again and request.replaced_task_nesting == headers.get("replaced_task_nesting")
    execution = current_execution()
    if execution is not None and not again:
        headers.setdefault(CAUSED_BY, execution.reference)


# Of each message that this process sends: an HTTP request's, too.
before_task_publish.connect(add_headers, dispatch_uid=f"{__name__}.headers")


class _Delivery:
    """One delivery of a task's message.

    Args:
        task: the task.
        request: its request, as Celery keeps it while the task runs.
    """

    def __init__(self, task: Any, request: Any) -> None:
        self.task = task
        self.request = request
        self.copies = int(request.get(COPIES) or 0)
        """The number of copies that were sent before this delivery; 0: it is not a copy."""

    def has_failed(self) -> bool:
        """Whether an earlier delivery of the message ended in a failure that Celery has recorded.

        An operator may send a failed task again with its id; but what the broker delivers again,
        or was sent for the case that a worker dies, has been reported.
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
        request, links = self.request, []
        for place, link in enumerate(request.callbacks or ()):
            links.append(_caused(link, reference))
            options = links[-1]["options"]
            if not (link.get("subtask_type") or options.get("task_id")):
                options["task_id"] = derived_key(
                    scope="celery.link", key=request.id, fingerprint="", name=str(place)
                )
        request.callbacks = links or None
        if request.chain:
            *others, following = request.chain  # Celery takes them from the end
            request.chain = [*others, _caused(following, reference)]

    def skip_what_was_sent(self) -> None:
        """Leave out of a replay what Celery has sent already: callbacks, and the chain's next task.

        It sends them before it stores the result. Where it counts the parts of a chord one by one,
        a part whose result is stored has been counted.

        Raises:
            OperationInProgress: another process alone may send the chord's body now. It may have
                died, so look again later.
        """
        if self._state() != states.SUCCESS:
            return
        self.request.callbacks = self.request.chain = None
        if counts_parts(self.task.backend):
            self.request.chord = None
        elif seconds := self._until_body_is_free():
            error = OperationInProgress("Another process is sending the body of the chord.")
            error.remaining = seconds
            raise error

    def kept_result(self, error: Exception) -> Any:
        """The result in Celery's result backend, if our record has no result.

        Raises:
            ResponseNotStored: Celery has none either.
        """
        if self.request.ignore_result or self.task.ignore_result:
            return None
        if self._state() != states.SUCCESS:
            raise error
        return self.task.backend.get_result(self.request.id)

    def _until_body_is_free(self) -> float:
        """Seconds for which one process alone may send the body of the chord; 0: it was sent.

        Since Celery 5.7, the process that counts the last part claims that in Redis.
        """
        backend, group = self.task.backend, self.request.group
        if not (self.request.chord and group and _is_redis(backend)):
            return 0
        key = backend.get_key_for_group(group, ".c")
        if backend.client.get(key) in (None, b"done"):
            return 0
        return float(max(0, backend.client.pttl(key)) / 1000)

    def send_copy(self, plan: Plan, reason: IdempotencyError) -> None:
        """Send the message once more for a later time, unless another delivery of it has done so.

        Each copy is numbered, and of each number one is sent. So the copies of a message form one
        chain, however often the broker delivers a message or a copy again.

        Raises:
            Reject: the broker takes no message; it is to deliver this one again.
        """
        request, number = self.request, self.copies + 1
        send = partial(self._send, number, self._pause(plan, reason, number))
        if isinstance(reason, StoreUnavailable):
            send()
            return
        turn = str(request.retries)
        if request.replaced_task_nesting:  # the id is that of what the task replaces
            turn += f".{request.replaced_task_nesting}"
        policy = Policy(
            store=plan.policy.store,
            mode=plan.policy.mode,
            on_conflict="reject",
            on_interrupted="resume",
            ttl=_COPY_TTL + plan.policy.lease,
            on_expired="execute",
        )
        try:
            idempotent_call(
                send,
                key=keys.fit(f"{request.id}:{turn}:{number}"),
                scope=scopes.fit(f"copies:{self.task.name}"),
                name=f"copy of {self.task.name}",
                policy=policy,
            )
        except IdempotencyError:
            send()  # it is unknown whether it was sent: better twice

    def _send(self, number: int, pause: float, _: ExecutionContext | None = None) -> None:
        task, request = self.task, self.request
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

    def _pause(self, plan: Plan, reason: IdempotencyError, number: int) -> float:
        """Seconds until the copy is looked at.

        The broker delivers a message again that a worker has kept for too long, so it is kept for
        half of that time at most.
        """
        remaining = reason.remaining if isinstance(reason, OperationInProgress) else None
        if remaining:
            pause = remaining + _SLACK
        else:  # unknown: twice as long each time, up to a lease
            first = conf.retry_after.total_seconds() or _SLACK
            longest = max(first, plan.policy.lease.total_seconds())
            backoff = Backoff(timedelta(seconds=first), timedelta(seconds=longest))
            pause = backoff.after(number).total_seconds()
        options = self.task.app.conf.broker_transport_options or {}
        visible = float(options.get("visibility_timeout") or _VISIBILITY_TIMEOUT)
        return min(pause, visible / 2)

    def _state(self) -> str:
        if self.request.is_eager:
            return states.PENDING
        return str(self.task.backend.get_state(self.request.id))


def _caused(successor: Mapping[str, Any], reference: str) -> dict[str, Any]:
    """The signature of a task that Celery sends later, with the operation that it comes from."""
    options = successor.get("options") or {}
    headers = {CAUSED_BY: reference, **(options.get("headers") or {})}
    return {**successor, "options": {**options, "headers": headers}}


def _is_redis(backend: Any) -> bool:
    # Importing its class imports the client of Redis, which takes as long as Celery itself.
    return any(base.__module__ == "celery.backends.redis" for base in type(backend).__mro__)


def counts_parts(backend: Any) -> bool:
    """Whether a result backend counts the parts of a chord without noting which were counted."""
    counting = BaseKeyValueStoreBackend.on_chord_part_return
    if getattr(type(backend), "on_chord_part_return", None) is counting:
        return bool(backend.implements_incr)
    return type(backend).__module__.startswith("django_celery_results.")
