"""The guarantees for plain Python: :func:`idempotent_call` runs a function once per key."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, Final, assert_never

from . import engine, keys, scopes
from .engine import Answer, Executed, Held, InProgress, Mismatched, Outcome, Replayed
from .errors import FingerprintMismatch, OperationHeld, OperationInProgress, ResponseNotStored
from .executions import Execution
from .fingerprints import canonical
from .policy import Policy
from .records import Operation, Payload
from .seals import content_digest, sealed, sealed_before
from .steps import as_json
from .stores import Store, stores

METHOD: Final = "CALL"
"""What stands for the HTTP method in the audit."""

_PROJECTS: Final = Policy()  # made once: what a policy leaves out is looked up once for each


def idempotent_call(
    *,
    key: str,
    scope: str,
    fn: Callable[[Execution], Any],
    fingerprint: Any = None,
    name: str = "",
    policy: Policy | None = None,
) -> Any:
    """Call the function once per key, and return what it returned to whoever calls again.

    ::

        def pay(execution):
            charge = provider.charge(order.amount, idempotency_key=execution.derive_key("charge"))
            return {"charge": charge.id}

        paid = idempotent_call(key=f"order-{order.pk}", scope="payments", fn=pay)

    Args:
        key: names the operation; 1-255 visible ASCII characters.
        scope: what the key is unique in.
        fn: what to do; it is given its :class:`~idempotency_django.executions.Execution`.
        fingerprint: what is asked for, as plain data; another one under the same key is refused.
        name: what the operation is called in the audit; the function's own name when left out.
        policy: how it is kept; the project's when left out.

    Returns:
        The result as it reads back from JSON, the first time too: a tuple is a list.

    Raises:
        KeyMalformed: the key is none.
        OperationInProgress: somebody else is executing it, and the policy does not wait so long.
        OperationHeld: it was interrupted, and an operator must settle it.
        FingerprintMismatch: the key was used for something else.
        ResponseNotStored: it was executed, but its result was too large to keep.
        StoreUnavailable: nothing was executed.
        TypeError: the result is not JSON; the call counts as failed.
        Exception: whatever the function raises; the next call executes it again.
    """
    store, resolved = _resolved(policy)
    lease = engine.lease_of(resolved, store)
    operation = _operation(resolved, key, scope, fingerprint, name or _name_of(fn), lease)

    def execute(execution: Execution) -> Answer:
        return _answer(resolved, operation, fn(execution))

    return _result(engine.run(store, resolved, operation, execute, _raise))


async def aidempotent_call(
    *,
    key: str,
    scope: str,
    fn: Callable[[Execution], Awaitable[Any]],
    fingerprint: Any = None,
    name: str = "",
    policy: Policy | None = None,
) -> Any:
    """:func:`idempotent_call` for a coroutine function."""
    store, resolved = _resolved(policy)
    lease = engine.lease_of(resolved, store, asynchronous=True)
    operation = _operation(resolved, key, scope, fingerprint, name or _name_of(fn), lease)

    async def execute(execution: Execution) -> Answer:
        return _answer(resolved, operation, await fn(execution))

    return _result(await engine.arun(store, resolved, operation, execute, _raise))


def _resolved(policy: Policy | None) -> tuple[Store, Policy]:
    resolved = (policy or _PROJECTS).resolved()
    return stores[resolved.store], resolved


def _operation(
    policy: Policy, key: str, scope: str, fingerprint: Any, name: str, lease: timedelta | None
) -> Operation:
    content = content_digest(canonical(fingerprint))
    return Operation(
        key=keys.checked(key),
        scope=scopes.fit(scope),
        name=name,
        fingerprint=sealed(content),
        content=content,
        former=sealed_before(content),
        ttl=policy.ttl,
        retention=policy.retention,
        lease=lease,
        hold=lease is not None and policy.on_interrupted == "hold",
        count_replays=policy.record_replays,
        extend_on_replay=policy.ttl_from == "last_use",
        method=METHOD,
    )


def _answer(policy: Policy, operation: Operation, result: Any) -> Answer:
    body: bytes | None = as_json(operation.name, result).encode()
    decoded = json.loads(body or b"null")
    if body is not None and len(body) > policy.max_response_bytes:
        body = None
    return Answer(decoded, Payload(200, (("Content-Type", "application/json"),), body))


def _raise(error: Exception) -> Answer:
    raise error


def _result(outcome: Outcome) -> Any:
    match outcome:
        case Executed(result):
            return result
        case Replayed(record):
            if record.payload is None or record.payload.body is None:
                raise ResponseNotStored
            return json.loads(record.payload.body)
        case InProgress():
            raise OperationInProgress
        case Held():
            raise OperationHeld
        case Mismatched():
            raise FingerprintMismatch
        case _:
            assert_never(outcome)


def _name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))
