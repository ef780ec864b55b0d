"""The guarantees for the jobs of any queue: :func:`idempotent_job` runs a function once per key."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import wraps
from typing import Any, TypeVar, cast

from asgiref.sync import iscoroutinefunction

from ..functions import aidempotent_call, idempotent_call
from ..policy import Policy, scopes
from .arguments import KeyRule, check_rule, fingerprint_of, key_of

Job = TypeVar("Job", bound=Callable[..., Any])


def idempotent_job(
    *,
    key: KeyRule,
    policy: Policy | None = None,
    scope: str = "",
    name: str = "",
    exclude: Collection[str] = (),
) -> Callable[[Job], Job]:
    """Run a job's function once per key; a message that is delivered again gets the first result.

    ::

        @task  # Django's tasks; dramatiq, rq and procrastinate alike
        @idempotent_job(key="order-{order_id}", policy=Policy(mode="leased"))
        def pay(order_id):
            execution = current_execution()
            return execution.step("charge", provider.charge, order_id)

    It goes below the decorator of the queue. The function may be a coroutine function.

    Args:
        key: the operation that a call names: a template of its arguments, or a callable that takes
            the same arguments and returns a text, a number or a UUID. A key that is longer than 255
            characters, or not visible ASCII, is replaced by its digest.
        policy: the policy; by default the project's.
        scope: the namespace that the key is unique in; by default the job's own,
            ``"job:<name>"``.
        name: the job's name; by default the function's module and name. Give one that stays when
            the function is renamed or moved.
        exclude: names of arguments that are not part of what is asked for, such as a context that
            the queue passes.

    Raises:
        ImproperlyConfigured: the template names what is not an argument of the function.

    The decorated function returns what the function returned first, as it reads back from JSON. It
    raises what :func:`~idempotency_django.functions.idempotent_call` raises; and:

    Raises:
        OperationInProgress: another delivery is being executed. Let the queue deliver it again
            later, or give the policy ``on_conflict="wait"``.
        TypeError: an argument is not plain data, so that a retry could not be recognised.
    """

    def decorate(function: Job) -> Job:
        job = name or f"{function.__module__}.{function.__qualname__}"
        check_rule(key, job, function)

        def asked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
            return {
                "key": key_of(key, job, function, args, kwargs),
                "scope": scope or scopes.fit(f"job:{job}"),
                "fingerprint": fingerprint_of(job, function, args, kwargs, exclude),
                "name": job,
                "policy": policy,
            }

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            return idempotent_call(**asked(args, kwargs), fn=lambda _: function(*args, **kwargs))

        @wraps(function)
        async def arun(*args: Any, **kwargs: Any) -> Any:
            call = aidempotent_call(**asked(args, kwargs), fn=lambda _: function(*args, **kwargs))
            return await call

        return cast(Job, arun if iscoroutinefunction(function) else run)

    return decorate
