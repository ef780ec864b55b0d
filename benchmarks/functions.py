"""The variants of one plain function, which does what the view does, without HTTP."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

from aws_lambda_powertools.utilities.idempotency import IdempotencyConfig, idempotent_function
from aws_lambda_powertools.utilities.idempotency.exceptions import (
    IdempotencyAlreadyInProgressError,
)
from aws_lambda_powertools.utilities.idempotency.persistence.cache import CachePersistenceLayer
from redis import Redis

from benchmarks.views import OrderSerializer
from idempotency_django.engine.context import ExecutionContext
from idempotency_django.engine.functions import idempotent_call
from idempotency_django.errors import OperationInProgress
from idempotency_django.policy import Policy

BARE: Final = "bare"
DATABASE: Final = "database"
FENCED: Final = "fenced"
REDIS: Final = "redis"
POWERTOOLS: Final = "powertools"
LABELS: Final = {
    BARE: "bare function",
    DATABASE: "`idempotent_call`",
    FENCED: '`idempotent_call`, `mode="leased"`, within `execution.atomic()`',
    REDIS: "`idempotent_call` on `RedisStore`",
    POWERTOOLS: "Powertools on Redis",
}

LATE: Final = "late owner"
SUCCESSOR: Final = "successor"

LEASE: Final = timedelta(seconds=30)
REFUSALS: Final = (OperationInProgress, IdempotencyAlreadyInProgressError)
"""What a duplicate is told while the first is being executed."""

Order = dict[str, Any]
Work = Callable[[Order], dict[str, Any]]
Function = Callable[[str, Order], dict[str, Any]]
"""Called with a key and an order."""


def create(order: Order) -> dict[str, Any]:
    """What the view does between its request and its response."""
    serializer = OrderSerializer(data=order)
    serializer.is_valid(raise_exception=True)
    serializer.save()
    return dict(serializer.data)


def made_by(maker: str, order: Order) -> dict[str, Any]:
    """Create the order and say who did."""
    create(order)
    return {"maker": maker}


def protected(variant: str, work: Work = create, lease: timedelta = LEASE) -> Function:
    """The function that does this work, protected as the variant does it."""
    match variant:
        case "bare":
            return lambda key, order: work(order)
        case "database":
            return _ours(work, Policy())
        case "fenced":
            return _ours(work, Policy(mode="leased", lease=lease), fenced=True)
        case "redis":
            return _ours(work, Policy(store="redis", lease=lease))
    return _powertools(work, lease)


def _ours(work: Work, policy: Policy, *, fenced: bool = False) -> Function:
    def call(key: str, order: Order) -> dict[str, Any]:
        def fn(execution: ExecutionContext) -> dict[str, Any]:
            if not fenced:
                return work(order)
            with execution.atomic():
                return work(order)

        result: dict[str, Any] = idempotent_call(
            fn, key=key, scope="orders", fingerprint=order, policy=policy
        )
        return result

    return call


class _Invocation:
    """What Lambda tells a function of the time that is left to it."""

    def __init__(self, lease: timedelta) -> None:
        self._milliseconds = round(lease.total_seconds() * 1000)

    def get_remaining_time_in_millis(self) -> int:
        return self._milliseconds


def _powertools(work: Work, lease: timedelta, **options: Any) -> Function:
    client = Redis.from_url(os.environ["BENCH_REDIS_URL"], decode_responses=True)
    day = 24 * 60 * 60
    config = IdempotencyConfig(event_key_jmespath="key", expires_after_seconds=day, **options)
    config.register_lambda_context(_Invocation(lease))  # type: ignore[arg-type]

    @idempotent_function(
        data_keyword_argument="order",
        config=config,
        persistence_store=CachePersistenceLayer(client=client),
    )
    def process(*, order: Order) -> dict[str, Any]:
        return work(order)

    return lambda key, order: process(order={**order, "key": key})  # type: ignore[no-any-return]
