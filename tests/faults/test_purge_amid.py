"""A purge that never rests, amid duplicates, leases, steps, failures, deaths and take-overs."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest

from idempotency_django.models import IdempotencyKey, IdempotencyStep
from idempotency_django.testing import eventually
from tests.faults.late_processes import DATABASES, Place, Worker, place, started
from tests.faults.late_views import SLOW
from tests.models import Effect
from tests.support.nightly import few, nightly
from tests.support.shared import new_key

pytestmark = [pytest.mark.e2e, pytest.mark.django_db(transaction=True, databases="__all__")]

LEASE = 1.0
TTL = 2.0
KEYS = 30
SLOW_KEYS = 2
DEATHS = 4
PATH = "/leased/lives/"


@pytest.fixture(scope="module", params=few(DATABASES))
def at(request: pytest.FixtureRequest, django_db_setup: None) -> Iterator[Place]:
    """A database, which has to be purged."""
    with place(request.param) as made:
        yield made


def lives(at: Place) -> dict[str, list[tuple[float, float]]]:
    """The lives in which each key's effect was done, by the database's clock: when it began, and
    when that was.
    """
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for reference in Effect.objects.using(at.alias).values_list("reference", flat=True):
        key, began, done = reference.split()
        found[key].append((float(began), float(done)))
    return {key: sorted(times) for key, times in found.items()}


def die(at: Place, folder: Path, keys: list[str]) -> None:
    """End processes in the middle of what they do, one for each key, half of it done or all."""
    with ExitStack() as stack:
        settings = {"lease": LEASE, "ttl": TTL}
        doomed = stack.enter_context(started(at.worker(folder, **settings) for _ in keys))
        for number, (each, key) in enumerate(zip(doomed, keys, strict=True)):
            each.begin("post", PATH, key, f"kill:{('effect', 'after')[number % 2]}")
        for each in doomed:
            each.tells("reached")
            each.until_dead()


@pytest.mark.parametrize(("seconds", "pause"), [(3.0, 0.02), nightly(6.0, 0.02), nightly(6.0, 0.0)])
def test_purge_amid_everything(at: Place, seconds: float, pause: float, tmp_path: Path) -> None:
    """No effect is done twice in a life, nothing that lives or runs is deleted, nothing is left."""
    keys = [new_key() for _ in range(KEYS)]
    doomed = [new_key() for _ in range(DEATHS)]
    slow = [f"{new_key()}{SLOW}" for _ in range(SLOW_KEYS)]
    workers = (at.worker(tmp_path, lease=LEASE, ttl=TTL) for _ in range(3))
    with started(workers) as [purger, *traffic]:
        die(at, tmp_path, doomed)
        purger.begin("purge", seconds)
        for each, more in zip(traffic, (doomed, slow), strict=True):
            each.begin("traffic", PATH, [*keys, *more], seconds, 4, failures=0.1, pause=pause)
        said = sum((Counter(each.tells("response")) for each in traffic), Counter[str]())
        purged = purger.tells("response")
        _purge_the_rest(at, purger)

    found = lives(at)
    pairs = [pair for times in found.values() for pair in pairwise(times)]
    gaps = [done_again - began for (began, _), (_, done_again) in pairs]
    assert set(said) <= {"201", "409", "failed", "replayed"}
    assert set(found) == {*keys, *doomed, *slow}
    assert min(gaps) >= TTL
    assert purged["purged"] > 0
    assert IdempotencyStep.objects.using(at.alias).count() == 0


def _purge_the_rest(at: Place, purger: Worker) -> None:
    """Purge until no record is left, which none may resist when its life and its lease are over."""
    until = time.monotonic() + TTL
    eventually(lambda: time.monotonic() >= until)

    def is_empty() -> bool:
        purger.do("purge", 0.1)
        return not IdempotencyKey.objects.using(at.alias).exists()

    eventually(is_empty)
