"""The guarantees for plain Python: :func:`idempotent_call` runs a function once per key."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, assert_never

from django.core.exceptions import ImproperlyConfigured

from ..errors import IdempotencyError, ResponseNotStored
from ..policy import INHERITED, UNSET, Policy
from ..policy.digests import canonical, digest
from ..stores.records import Payload
from .context import ExecutionContext, as_json
from .outcomes import (
    Executed,
    Expired,
    Held,
    InProgress,
    Mismatched,
    Outcome,
    Replayed,
    Result,
    refusal,
    reraise,
)
from .planning import Plan, plan_call
from .running import arun, run

METHOD: Final = "CALL"
"""The value in place of the HTTP method in the audit."""


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """The outcome of a call.

    Attributes:
        result: the function's result, as it reads back from what is stored.
        replayed: whether it is the stored result of an earlier call, not of this one.
    """

    result: Any
    replayed: bool


def idempotent_call(
    function: Callable[[ExecutionContext], Any],
    /,
    *,
    key: str,
    scope: str,
    fingerprint: Any = None,
    name: str = "",
    policy: Policy | None = None,
) -> Any:
    """Call the function once per key; later calls with the key return the same result.

    ::

        def pay(execution):
            charge = provider.charge(order.amount, idempotency_key=execution.derive_key("charge"))
            return {"charge": charge.id}

        paid = idempotent_call(pay, key=f"order-{order.pk}", scope="payments")

    Args:
        function: what to do; it gets its
            :class:`~idempotency_django.engine.context.ExecutionContext`.
        key: names the operation; 1-255 visible ASCII characters.
        scope: the namespace that the key is unique in.
        fingerprint: what the call asks for, as plain data: JSON's types, dates, dataclasses, saved
            models; see :func:`~idempotency_django.policy.digests.canonical`. Another
            fingerprint under the same key is refused.
        name: the operation's name; by default the function's own. Another name under the same key
            is refused, so give one that stays when the function is renamed.
        policy: the policy; by default the project's.

    Returns:
        The result as ``DjangoJSONEncoder`` writes it and JSON reads it back, also the first time.
        So a tuple is a list, and a ``Decimal`` is a string.

    Raises:
        KeyMalformed: the key is not 1-255 visible ASCII characters.
        ValueError: the scope is empty.
        OperationInProgress: another process is executing it, and the policy's wait is over.
        OperationHeld: it was interrupted or failed too often: an operator must settle it.
        FingerprintMismatch: the key was used for something else.
        ResponseNotStored: it was executed, but its result was too large to keep, or the policy has
            ``max_response_bytes=0``.
        StoreUnavailable: the store cannot be reached. The text says what is known.
        TypeError: the fingerprint is not plain data; nothing was executed. Or the result is not
            JSON; the call counts as failed.
        Exception: an error of the function; the next call executes it again.
    """
    plan = _plan(function, policy, key, scope, name, fingerprint)
    return run_plan(plan, function).result


async def aidempotent_call(
    function: Callable[[ExecutionContext], Awaitable[Any]],
    /,
    *,
    key: str,
    scope: str,
    fingerprint: Any = None,
    name: str = "",
    policy: Policy | None = None,
) -> Any:
    """:func:`idempotent_call` for a coroutine function."""
    plan = _plan(function, policy, key, scope, name, fingerprint, asynchronous=True)

    async def execute(execution: ExecutionContext) -> Result:
        return json_result(plan, await function(execution))

    with _foreign_errors():
        return _outcome_of(await arun(plan.store, plan.operation, execute, reraise), plan).result


def run_plan(plan: Plan, function: Callable[[ExecutionContext], Any]) -> CallOutcome:
    """:func:`idempotent_call` for an adapter that has planned the call itself."""

    def execute(execution: ExecutionContext) -> Result:
        return json_result(plan, function(execution))

    with _foreign_errors():
        return _outcome_of(run(plan.store, plan.operation, execute, reraise), plan)


@contextmanager
def _foreign_errors() -> Iterator[None]:
    """Mark the errors of the call: a request that makes it is another operation."""
    try:
        yield
    except IdempotencyError as error:
        error.foreign = True
        raise


def _plan(
    function: Callable[[ExecutionContext], Any],
    policy: Policy | None,
    key: str,
    scope: str,
    name: str,
    fingerprint: Any,
    *,
    asynchronous: bool = False,
) -> Plan:
    if policy is not None and policy.check_replay not in (UNSET, None):
        raise ImproperlyConfigured(
            "The policy of an idempotent_call has check_replay=, which checks the caller of an "
            "HTTP request. An idempotent_call has no request. Check the caller's permission "
            "before the call."
        )
    if not scope:
        raise ValueError(
            "The scope is empty. Pass the namespace of the key, for example the name of the "
            "operation or of the tenant."
        )
    innermost = _innermost(function)
    return plan_call(
        (policy or INHERITED).resolved(),
        key=key,
        scope=scope,
        name=name or innermost.__qualname__,
        # With the name, so that another function under the key is not given this one's result.
        content_digest=digest(
            canonical((name or f"{innermost.__module__}.{innermost.__qualname__}", fingerprint))
        ),
        method=METHOD,
        asynchronous=asynchronous,
    )


def json_result(plan: Plan, result: Any) -> Result:
    """The result of a plain Python handler, as it reads back from JSON, and its stored form."""
    text = as_json(plan.operation.name, result)
    body = text.encode()
    kept = len(body) <= plan.policy.max_response_bytes
    headers = (("Content-Type", "application/json"),)
    return Result(json.loads(text), Payload(200, headers, body if kept else None))


def _outcome_of(outcome: Outcome, plan: Plan) -> CallOutcome:
    match outcome:
        case Executed(result):
            return CallOutcome(result, replayed=False)
        case Replayed(record):
            if record.payload is None or record.payload.body is None:
                raise ResponseNotStored
            return CallOutcome(record.payload.result, replayed=True)
        case Expired() | InProgress() | Held() | Mismatched():
            raise refusal(outcome, f"The key {plan.operation.key!r} of {plan.operation.name}")
        case _:
            assert_never(outcome)


def _innermost(function: Any) -> Any:
    """The object with the function's name: itself, or the function or class that it wraps."""
    while isinstance(function, partial):
        function = function.func
    return function if hasattr(function, "__qualname__") else type(function)
