"""Celery tasks: a message that the broker delivers twice takes effect once.

This package imports Celery, so the extra ``celery`` must be installed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, ClassVar, Final, NoReturn

from django.apps import apps
from django.core.checks import CheckMessage, Warning  # noqa: A004  # Django's name
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import autodiscover_modules, import_string

from ..engine import ExecutionContext, Plan, current_execution, plan_call, run_plan
from ..errors import (
    ClaimLost,
    KeyExpired,
    OperationInProgress,
    ResponseNotStored,
    StoreUnavailable,
)
from ..lazy import extra
from ..policy import INHERITED, UNSET, Policy, canonical, digest, keys, scopes
from ..stores import derived_key
from .jobs import KeyRule, check_rule, fingerprint_of, key_of

with extra("celery"):
    from celery import Celery, Task, current_app, current_task, states
    from celery.exceptions import Ignore, Reject
    from celery.signals import before_task_publish
    from kombu.exceptions import OperationalError
    from kombu.utils.json import dumps

__all__ = ["IdempotentTask"]

METHOD: Final = "TASK"
"""The value in place of the HTTP method in the audit."""

CAUSED_BY: Final = "idempotency_caused_by"
"""The header: the reference of the record of the operation that sent the message."""

AGAIN: Final = "idempotency_again"
"""The header of a message that a delivery has sent once more, for later."""

_LATER: Final = (OperationInProgress, StoreUnavailable, ClaimLost)
"""Errors that do not describe the task's result: its message is sent again."""

_IGNORED: Final = "celery.Ignore"
"""The type of the stored result of a task that raised ``Ignore``."""


class IdempotentTask(Task):  # type: ignore[type-arg]  # generic in its stubs only
    """A task that takes effect once, however often its message is delivered.

    ::

        @app.task(base=IdempotentTask, bind=True, idempotency_policy=Policy(mode="leased"))
        def pay(self, order_id):
            key = self.execution.derive_key("charge")
            return self.execution.step("charge", provider.charge, order_id, idempotency_key=key)

    ``@shared_task(base=IdempotentTask)`` and ``Celery(task_cls=IdempotentTask)`` do the same.
    Celery's own tasks (``celery.*``) are left alone.

    A delivery that finds the task completed returns the first result. A delivery that finds it in
    progress sends the message once more, with the same id and for the end of the lease, and is then
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
                policy is none, or one that checks the caller of an HTTP request, or it has another
                name than ``idempotency_policy``.
        """
        super().on_bound(app)
        if hasattr(cls, "idempotency"):
            raise ImproperlyConfigured(
                f"The task {cls.name} has idempotency=, which nothing reads. Write "
                "idempotency_policy=."
            )
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
        broker. A task whose ``key`` is completed returns the first result, however often it is
        sent.

        Args:
            args: the task's positional arguments, as for ``delay()``.
            kwargs: the task's keyword arguments.

        Returns:
            The task's id. The result is not there before the commit, so do not wait for it.

        Raises:
            ImproperlyConfigured: no transaction is open on the database of the outbox, or the app
                ``idempotency_django.contrib.messaging`` is not installed.
            TypeError: an argument is not plain data, or nothing that Celery's JSON can hold.
        """
        task = self.name
        fingerprint_of(f"the task {task}", self.run, args, kwargs)  # now, not in the worker
        if self.key is not None:
            key_of(self.key, f"the task {task}", self.run, args, kwargs)
        if not apps.is_installed("idempotency_django.contrib.messaging"):
            raise ImproperlyConfigured(
                "enqueue_once() needs the outbox, which is not installed. Add "
                '"idempotency_django.contrib.messaging" to INSTALLED_APPS, a topic "celery" to '
                "IDEMPOTENCY['OUTBOX'], and run a relay."
            )
        # It has models, which can only be imported where the app is installed.
        publish: Callable[..., str] = import_string("idempotency_django.contrib.messaging.publish")
        try:
            plain_args, plain_kwargs = json.loads(dumps([args, kwargs]))
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"An argument of the task {task} is not JSON, so the outbox cannot store it: "
                f"{error}. Pass plain data, for example a primary key."
            ) from error
        return publish("celery", {"args": plain_args, "kwargs": plain_kwargs}, type=task)

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
        request: Any = self.request
        # A call during a delivery's execution is a function's.
        called = request.called_directly or hasattr(request, "idempotency")
        if self.name.startswith("celery.") or (called and self.key is None):
            return super().__call__(*args, **kwargs)
        if called:
            return self._called(args, kwargs)
        return self._delivered(request, args, kwargs)

    def _called(self, args: Any, kwargs: Any) -> Any:
        """The result of a call as a function, which has no message and is named by its key."""

        def execute(execution: ExecutionContext) -> Any:
            self.push_request(args=args, kwargs=kwargs, idempotency=execution)
            try:
                return self.run(*args, **kwargs)
            finally:
                self.pop_request()

        return _unpack(run_plan(self._plan(args, kwargs), execute).result)

    def _delivered(self, request: Any, args: Any, kwargs: Any) -> Any:
        """The result of a message."""
        raised: list[Exception] = []

        def execute(execution: ExecutionContext) -> Any:
            request.idempotency = execution
            try:
                return self.run(*args, **kwargs)
            except Ignore as ignore:
                return {"__type__": _IGNORED, "__value__": str(ignore)}
            except Exception as error:
                raised.append(error)  # any error is the task's own
                raise

        # An operator may send a failed task again with its id, but not the broker, and not we.
        again = _header(request, AGAIN) or (request.delivery_info or {}).get("redelivered")
        plan = self._plan(args, kwargs, request)
        _name_callbacks(request)
        try:
            if again and self._state(request) == states.FAILURE:
                raise Ignore("This delivery's task has failed, and was reported as failed.")
            outcome = run_plan(plan, execute)
            result = _unpack(outcome.result)
            return self._finished(request, result) if outcome.replayed else result
        except (KeyExpired, ResponseNotStored) as error:
            if error in raised:
                raise
            return self._finished(request, self._kept_result(request, error))
        except _LATER as error:
            if error in raised or request.is_eager:
                raise
            self._send_again(request, plan, error)

    def _send_again(self, request: Any, plan: Plan, error: Exception) -> NoReturn:
        """Send the message once more, for the time when the lease of the claim in the way ends.

        Raises:
            Ignore: it was sent.
            Reject: the broker takes no message; it is to deliver this one again.
        """
        message = self.signature_from_request(
            request,
            countdown=getattr(error, "remaining", None) or plan.policy.lease.total_seconds(),
            expires=None,  # the task was begun in time
            headers={**(request.headers or {}), AGAIN: True},
            argsrepr=request.get("argsrepr"),
            kwargsrepr=request.get("kwargsrepr"),
        )
        try:
            message.apply_async()
        except OperationalError as failure:
            raise Reject(failure, requeue=True) from failure
        raise Ignore(f"It is retried later: {error}") from None

    def _finished(self, request: Any, result: Any) -> Any:
        """The result of a replay.

        Celery sends callbacks before it stores the result, so they are left out if it is there.
        """
        if self._state(request) == states.SUCCESS:
            request.callbacks = request.chain = None
        return result

    def _kept_result(self, request: Any, error: Exception) -> Any:
        """The result in the result backend, as our record has none; else the error is raised."""
        if request.ignore_result or self.ignore_result:
            return None
        if self._state(request) != states.SUCCESS:
            raise error
        return self.backend.get_result(request.id)

    def _state(self, request: Any) -> str:
        """What the result backend has of the task; without a backend, nothing is known.

        Raises:
            StoreUnavailable: the backend cannot be reached.
        """
        try:
            return str(states.PENDING if request.is_eager else self.backend.get_state(request.id))
        except NotImplementedError:  # of the backend that stands for none
            return str(states.PENDING)
        except Exception as error:  # each backend has its own
            raise StoreUnavailable(f"The result backend cannot be reached: {error}") from error

    def _plan(self, args: Any, kwargs: Any, request: Any = None) -> Plan:
        """The plan of a message, or of a call as a function."""
        arguments = fingerprint_of(f"the task {self.name}", self.run, args, kwargs)
        if self.key is not None:
            key = key_of(self.key, f"the task {self.name}", self.run, args, kwargs)
        else:  # a replacement has the id of what it replaces
            nesting = request.replaced_task_nesting
            key = keys.fit(f"{request.id}:{nesting}" if nesting else request.id)
        return plan_call(
            (self.idempotency_policy or INHERITED).resolved(),
            key=key,
            scope=scopes.fit(f"task:{self.name}"),
            name=self.name,
            content_digest=digest(canonical((self.name, arguments))),
            method=METHOD,
            max_attempts=self.max_attempts,
            caused_by=str(_header(request, CAUSED_BY) or "") if request else "",
        )


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


def _name_callbacks(request: Any) -> None:
    """Give the callbacks of a task lasting ids.

    A worker that dies while it sends them leaves it to the next one to send them again. A callback
    that is an :class:`IdempotentTask` then takes effect once.
    """
    for place, link in enumerate(request.callbacks or ()):
        if not link.get("subtask_type"):
            derived = derived_key(
                scope="celery.link", key=request.id, fingerprint="", name=str(place)
            )
            link["options"].setdefault("task_id", derived)


def add_cause(*, headers: dict[str, Any], **_: Any) -> None:
    """Tell a message which operation sends it; also one that Celery sends after the task.

    A task that sends itself again, as by ``retry()``, has no new parent.
    """
    request: Any = current_task.request if current_task else None
    execution = current_execution() or getattr(request, "idempotency", None)
    if execution is not None and (request is None or _identity(request) != _identity(headers)):
        headers.setdefault(CAUSED_BY, execution.reference)


def _identity(message: Any) -> tuple[Any, Any]:
    return message.get("id"), message.get("replaced_task_nesting")


# Of each message that this process sends: an HTTP request's, too.
before_task_publish.connect(add_cause, dispatch_uid=f"{__name__}.cause")


# The check of all tasks, which the app registers if Celery is installed.

_NO_APP: Final = "default"
"""The name of Celery's default app."""

_OPTIONS: Final = ("idempotency_policy", "idempotency", "key")


def check_celery(**_: Any) -> Iterator[CheckMessage]:
    """Tasks with options of an idempotent one, which nothing reads."""
    app: Any = current_app
    if app.main == _NO_APP:
        return
    # Celery's own way to import them would run the checks again, from within a worker.
    autodiscover_modules("tasks")
    for name, task in sorted(app.tasks.items()):
        options = vars(type(task))  # a key of a base class is the project's own affair
        given = [f"{option}=" for option in _OPTIONS if options.get(option) is not None]
        if given and not isinstance(task, IdempotentTask):
            yield Warning(
                f"The task {name} has {' and '.join(given)}, but is not an IdempotentTask, so each "
                "delivery and each call repeats its effects.",
                hint="Give it base=IdempotentTask, or remove these options.",
                id="idempotency_django.W061",
            )
