"""Owners that are late: paused past their lease, taken over, and let go on; one that is not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from idempotency_django.engine.context import ExecutionContext
from idempotency_django.engine.leases import Lease
from idempotency_django.errors import ClaimLost
from idempotency_django.stores.records import Claim, Operation, Payload, Record, Status
from idempotency_django.testing import RESPONSE, an_operation, eventually
from tests.faults.late_processes import DATABASES, PLACES, SCOPE, Place, Worker, place, started
from tests.models import Effect
from tests.support.nightly import few, nightly, sizes
from tests.support.shared import new_key

pytestmark = [pytest.mark.e2e, pytest.mark.django_db(transaction=True, databases="__all__")]

MOMENT = timedelta(milliseconds=1)
MINUTE = timedelta(minutes=1)
LATE = Payload(201, (), b"late")


@pytest.fixture(scope="module", params=few(PLACES))
def at(request: pytest.FixtureRequest, django_db_setup: None) -> Iterator[Place]:
    """A place to keep records at."""
    with place(request.param) as made:
        yield made


# Redis has neither transactions nor steps.
on_databases = pytest.mark.parametrize("at", DATABASES, indirect=True, scope="module")


@pytest.fixture(scope="module")
def workers(at: Place, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Worker]]:
    """Two worker processes, with a lease of a second."""
    folder = tmp_path_factory.mktemp("late")
    with started(at.worker(folder, lease=1) for _ in range(2)) as workers:
        yield workers


def late_and_successor(
    workers: list[Worker], path: str, fault: str, key: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The responses to a client whose worker is paused at that moment, and to one who retried."""
    late, other = workers
    late.begin("post", path, key, fault)
    late.tells("reached")
    with late.paused():
        # The second cannot have waited for the first, which does not go on before this has ended.
        successor = other.post_until(201, path, key)
    return late.tells("response"), successor


def assert_superseded(late: dict[str, Any], successor: dict[str, Any]) -> None:
    """The late one's client was given the successor's response."""
    assert successor["status"] == late["status"] == 201, (late, successor)
    assert (successor["replayed"], late["replayed"]) == (False, True)
    assert late["body"] == successor["body"]
    assert json.loads(late["body"])["attempt"] == 2


def test_paused_in_its_handler(at: Place, workers: list[Worker]) -> None:
    """Nothing that a late owner tries to write is written; its client gets the successor's."""
    key = new_key()
    late, successor = late_and_successor(workers, "/leased/outside/", "stop:handler", key)
    assert late["seen"]
    assert not any(late["seen"].values()), late["seen"]
    assert_superseded(late, successor)
    assert Effect.objects.using(at.alias).count() == 1  # by the derived key, thrice asked for
    assert at.effects(key) == 0
    assert at.store.get(key, SCOPE).attempt == 2  # type: ignore[union-attr]


LEASES, LONGER = 2, 6.0
"""Leases, and the seconds of each, so that a heartbeat comes in time, on a slow machine too."""


@pytest.mark.parametrize("pause", [0.1, nightly(0.02)])
def test_healthy_heartbeat_keeps_a_long_handler(at: Place, pause: float, tmp_path: Path) -> None:
    """Through several leases a running owner is never taken over, though others always try."""
    key, path = new_key(), at.path
    with started(at.worker(tmp_path, lease=LONGER) for _ in range(2)) as [owner, contender]:
        owner.begin("post", path, key, "wait:handler")
        owner.tells("reached")
        told = contender.do("traffic", path, [key], LEASES * LONGER, 4, pause=pause)
        owner.go_on()
        first, retry = owner.tells("response"), contender.do("post", path, key)
    assert set(told) == {"409"}, told
    assert (first["status"], first["replayed"]) == (201, False), first
    assert json.loads(first["body"])["attempt"] == 1
    assert (retry["replayed"], retry["body"]) == (True, first["body"])
    assert at.done(key) == 1


# The numbers. A lease of a millisecond is over as soon as anybody looks.


def taken_over(at: Place) -> tuple[Claim, Claim]:
    """A claim whose lease is over, and that of its successor."""
    operation = an_operation(lease=MOMENT)
    late = at.store.acquire(operation)
    assert isinstance(late, Claim)
    return late, successor_of(at, operation)


def successor_of(at: Place, operation: Operation) -> Claim:
    """Take an operation over as soon as its lease is over."""
    longer = an_operation(key=operation.key, lease=MINUTE)
    found: list[Claim | Record] = []

    def claimed() -> bool:
        found[:] = [at.store.acquire(longer)]
        return isinstance(found[0], Claim)

    eventually(claimed)
    [claim] = found
    assert isinstance(claim, Claim)
    assert claim.attempt == 2
    return claim


@pytest.mark.parametrize("tries", sizes(20, 200))
def test_late_completions(at: Place, tries: int) -> None:
    """No late owner completes, fails or extends, before and after its successor has completed."""
    accepted = dict.fromkeys(["complete", "fail", "extend"], 0)
    for _ in range(tries):
        late, successor = taken_over(at)
        for _ in range(2):
            accepted["complete"] += at.store.complete(late, LATE)
            accepted["fail"] += at.store.fail(late, "late")
            accepted["extend"] += at.store.extend(late, 60)
            at.store.complete(successor, RESPONSE)
        record = at.store.get(late.key, late.scope)
        assert record is not None
        assert (record.status, record.attempt) == (Status.COMPLETED, 2)
        assert record.payload == RESPONSE
    assert not any(accepted.values())


@on_databases
@pytest.mark.parametrize("tries", sizes(20, 200))
@pytest.mark.parametrize("how", ["atomic", "step"])
def test_late_commits(at: Place, elsewhere: ThreadPoolExecutor, how: str, tries: int) -> None:
    """No transaction of a late owner commits, though it began in time and has done its work."""
    for number in range(tries):
        operation = an_operation(lease=MOMENT)
        late = at.store.acquire(operation)
        assert isinstance(late, Claim)
        execution = ExecutionContext(at.store, late, Lease(at.store, late, 60, 0))
        execution._lease._valid_until = float("inf")  # type: ignore[union-attr]  # it is none the wiser

        def work(asked: Operation = operation, key: str = f"late {number}") -> None:
            Effect.objects.using(at.alias).create(reference=key)
            successor = elsewhere.submit(successor_of, at, asked).result()
            if number % 2:  # noqa: B023  # half of the successors are done by then
                elsewhere.submit(at.store.complete, successor, RESPONSE).result()

        with pytest.raises(ClaimLost):
            if how == "step":
                execution.step("work", work)
            else:
                with execution.atomic():
                    work()
    assert not Effect.objects.using(at.alias).filter(reference__startswith="late").exists()
