"""Copies of a message that came too early: the task is in progress, and its worker may die."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any, Final

from celery.exceptions import Reject
from kombu.exceptions import OperationalError

from ...engine.context import ExecutionContext
from ...errors import IdempotencyError, OperationInProgress, StoreUnavailable
from ...functions import idempotent_call
from ...planning import Plan
from ...policy import Policy, keys, scopes
from .deliveries import COPIES, Delivery

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
            key=keys.fit(f"{request.id}:{turn}:{number}"),
            scope=scopes.fit(f"copies:{delivery.task.name}"),
            name=f"copy of {delivery.task.name}",
            fn=send,
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
        first = plan.policy.retry_after.total_seconds() or SLACK
        longest = max(first, plan.policy.lease.total_seconds())
        pause = min(first * 2 ** min(number - 1, 16), longest)
    options = delivery.task.app.conf.broker_transport_options or {}
    visible = float(options.get("visibility_timeout") or VISIBILITY_TIMEOUT)
    return min(pause, visible / 2)
