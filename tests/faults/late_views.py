"""The views of a worker process, and the faults that befall it at the moments they name.

A request's ``X-Fault`` is ``what:moment``. It is no part of what is asked for, so that a retry
without it is the same request. ``stop`` pauses the whole process (SIGSTOP), ``kill`` ends it, and
``wait`` waits until the test says go on.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from django.http import HttpRequest, JsonResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt

from idempotency_django.decorators import idempotent
from idempotency_django.engine.context import ExecutionContext
from idempotency_django.errors import ClaimLost
from idempotency_django.models import DatabaseNow, IdempotencyKey
from idempotency_django.stores.records import Payload
from tests.models import Effect

LATE = Payload(201, (), b"late")
SLOW = "-slow"  # how a key ends whose operation takes longer than its response lives

seen: dict[str, Any] = {}
"""What a late owner was allowed, in the request that is being handled."""


def tell(**event: Any) -> None:
    """Tell the test something."""
    print(json.dumps(event), flush=True)


class Fault:
    """What befalls the process in this request."""

    def __init__(self, request: HttpRequest) -> None:
        self.what, _, self.moment = request.headers.get("X-Fault", "").partition(":")

    def reach(self, moment: str) -> bool:
        """Come to that moment; whether something befell the process there."""
        if moment != self.moment:
            return False
        if self.what != "fail":
            tell(reached=moment)
        getattr(self, self.what)()
        return True

    def stop(self) -> None:
        """Be paused, with all threads."""
        os.kill(os.getpid(), signal.SIGSTOP)

    def kill(self) -> None:
        """End."""
        os.kill(os.getpid(), signal.SIGKILL)

    def fail(self) -> None:
        """Raise an error."""
        raise InterruptedError(self.moment)

    def wait(self) -> None:
        """Wait until the test says go on."""
        sys.stdin.readline()


@csrf_exempt
@idempotent(required=True, mode="leased")
def leased(request: HttpRequest, how: str) -> JsonResponse:
    """Do something that happens once, in one of the ways that there are to do it."""
    execution: ExecutionContext = request.idempotency  # type: ignore[attr-defined]
    fault = Fault(request)
    WAYS[how](execution, fault)
    return JsonResponse({"attempt": execution.attempt, "worker": os.getpid()}, status=201)


@csrf_exempt
@idempotent(required=True, mode="transactional")
def transactional(request: HttpRequest) -> JsonResponse:
    """Do something in the one transaction that holds the claim."""
    fault = Fault(request)
    Effect.objects.create(reference=request.idempotency.key)  # type: ignore[attr-defined]
    fault.reach("effect")
    return JsonResponse({"worker": os.getpid()}, status=201)


def outside(execution: ExecutionContext, fault: Fault) -> None:
    """Ask a provider that honours the derived key, and be late before and after."""
    provider(execution.derive_key("charge"))
    if fault.reach("handler") and fault.what != "wait":
        seen.update(try_everything(execution))
    provider(execution.derive_key("charge"))


def atomic(execution: ExecutionContext, fault: Fault) -> None:
    """Do it in a transaction that a late owner cannot commit."""
    fault.reach("handler")
    with execution.atomic():
        Effect.objects.create(reference=execution.key)
        fault.reach("effect")


def steps(execution: ExecutionContext, fault: Fault) -> None:
    """Do it in the second of three steps."""
    execution.step("first", lambda: Effect.objects.create(reference=f"1 {execution.key}").pk)
    fault.reach("between")

    def second() -> int:
        effect = Effect.objects.create(reference=execution.key)
        fault.reach("effect")
        return effect.pk

    execution.step("second", second)
    fault.reach("after")
    execution.step("third", lambda: Effect.objects.create(reference=f"3 {execution.key}").pk)


def lives(execution: ExecutionContext, fault: Fault) -> None:
    """Do it in a step, and note when the key's life began in which it was done, and when that was.

    The first is when a statement was sent that may have waited for its turn.
    """

    def do() -> None:
        times = IdempotencyKey.objects.values_list("created_at", DatabaseNow())
        began, done = (moment.timestamp() for moment in times.get(key=execution.key))
        Effect.objects.create(reference=f"{execution.key} {began:.6f} {done:.6f}")
        fault.reach("effect")

    execution.step("do", do)
    fault.reach("after")
    if execution.key.endswith(SLOW):
        time.sleep(1.5 * execution.operation.ttl.total_seconds())  # type: ignore[union-attr]
    execution.step("done", lambda: None)


WAYS: dict[str, Callable[[ExecutionContext, Fault], None]] = {
    "outside": outside,
    "atomic": atomic,
    "steps": steps,
    "lives": lives,
}


def provider(key: str) -> None:
    """Somebody else's service: it does once what it is asked for under one key."""
    Effect.objects.get_or_create(reference=key)


def try_everything(execution: ExecutionContext) -> dict[str, Any]:
    """What an owner may still do: all that it could try to write."""
    store, claim = execution._store, execution._claim
    allowed: dict[str, Any] = {
        "complete": store.complete(claim, LATE),
        "fail": store.fail(claim, "late"),
        "extend": store.extend(claim, 60),
    }
    if not store.supports_transactions:
        return allowed

    def effect() -> None:
        Effect.objects.create(reference=execution.key)

    def in_atomic() -> None:
        with execution.atomic():
            effect()

    def in_fence() -> None:  # without asking first
        with store.fenced(claim):
            effect()

    tries = {"atomic": in_atomic, "fence": in_fence, "step": lambda: execution.step("x", effect)}
    return allowed | {name: _allowed(attempt) for name, attempt in tries.items()}


def _allowed(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except ClaimLost:
        return False
    return True


urlpatterns = [
    path("leased/<str:how>/", leased),
    path("transactional/", transactional),
]
