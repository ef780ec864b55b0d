"""Deliveries that come several times, in any order, among hostile ones, to processes that die."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from django.conf import settings

from idempotency_django.contrib.messaging.models import InboxMessage
from idempotency_django.testing import eventually
from tests.support.nightly import sizes
from tests.support.shared import effect_counts

from .site import Site, site
from .test_killed import body_of, pending

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1800),
    pytest.mark.django_db(transaction=True, databases="__all__"),
]

SEED = int(os.environ.get("WEBHOOK_SEED", "1"))
SENDERS = 8


def hostile(at: Site, chance: random.Random) -> int:
    """Send what nobody has signed; the status."""
    headers = {
        name: "".join(chance.choices("v1,=.tabc0189 é", k=chance.randint(0, 40))).strip()
        for name in chance.sample(
            ["webhook-id", "webhook-timestamp", "webhook-signature", "Content-Type", "X-Odd"], 3
        )
    }
    encoded = {name: value.encode("latin-1").decode("latin-1") for name, value in headers.items()}
    return at.post(chance.randbytes(chance.randint(0, 300)), encoded)


@pytest.mark.parametrize("deliveries", sizes(100, 300, "WEBHOOK_DELIVERIES"))
@pytest.mark.parametrize("name", list(settings.ALIASES))
def test_storm(name: str, deliveries: int, tmp_path: Path) -> None:
    """One effect for each message, nothing else stored, and no 5xx but 503."""
    number = (deliveries if name == "postgres" else deliveries // 5) * 2 // 5
    chance = random.Random(SEED)
    jobs = [f"m-{at}" for at in range(number) for _ in range(chance.randint(1, 4))]
    jobs += [""] * (number // 2)
    chance.shuffle(jobs)
    told: Counter[int] = Counter()
    refused: Counter[int] = Counter()
    stop = threading.Event()

    with site(name, tmp_path / "struck", kills=max(5, number // 20)) as at:

        def send(job: str) -> None:
            if job:
                told.update(at.until_accepted(job, body_of(group=str(hash(job) % 50))))
            else:
                refused.update([hostile(at, random.Random(chance.random()))])

        def kill() -> None:
            while not stop.wait(chance.uniform(0.2, 0.6)):
                at.kill_worker(chance)

        killer = threading.Thread(target=kill)
        killer.start()
        with ThreadPoolExecutor(SENDERS) as senders:
            list(senders.map(send, jobs))
        stop.set()
        killer.join()
        eventually(lambda: pending(name) == 0)
    assert {*told} <= {200, 503, 0}
    assert {*refused} <= {400, 401, 413, 0}
    assert effect_counts(settings.ALIASES[name]) == {f"m-{at}": 1 for at in range(number)}
    rows = InboxMessage.objects.using(settings.ALIASES[name])
    assert Counter(rows.values_list("state", flat=True)) == {"done": number}
