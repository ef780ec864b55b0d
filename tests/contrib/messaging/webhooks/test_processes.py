"""Deliveries to processes that die: what was acknowledged is handled, and has one effect."""

from __future__ import annotations

import json
import os
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings

from idempotency_django.contrib.messaging.models import InboxMessage
from idempotency_django.testing import eventually
from tests.support.nightly import first_database, sizes
from tests.support.shared import effect_counts

from .site import Site, site

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1800),
    pytest.mark.django_db(transaction=True, databases="__all__"),
]

MOMENTS = ("before the response", "before the effect", "before the commit")
SEED = int(os.environ.get("WEBHOOK_SEED", "1"))
SENDERS = 8


def rows(name: str, **chosen: Any) -> Any:
    return InboxMessage.objects.using(settings.ALIASES[name]).filter(**chosen)


def body_of(**data: object) -> bytes:
    return json.dumps({"type": "order.paid", **data}).encode()


@pytest.mark.parametrize("name", list(settings.ALIASES))
def test_at_every_moment(name: str, tmp_path: Path) -> None:
    """Killed between commit and 2xx, before the effect, or before its commit: one effect."""
    with site(name, tmp_path / "struck") as at:
        for moment in MOMENTS:
            statuses = at.until_accepted(moment, body_of(strike=moment))
            assert statuses[-1] == 200
            assert (len(statuses) > 1) == (moment == "before the response")
        eventually(lambda: not rows(name, state="pending").exists())
    assert effect_counts(settings.ALIASES[name]) == dict.fromkeys(MOMENTS, 1)
    struck = (tmp_path / "struck").read_text().splitlines()
    assert sorted(struck) == sorted(f"{moment}: {moment}" for moment in MOMENTS)


@first_database("name", indirect=False)
def test_poison(name: str, tmp_path: Path) -> None:
    """What kills each process that handles it is counted and dead, and leaves no effect."""
    with site(name, tmp_path / "struck", MAX_ATTEMPTS="2") as at:
        at.until_accepted("deadly", body_of(kills=True))
        at.until_accepted("other", body_of())
        eventually(lambda: rows(name, message_id="deadly", state="dead").exists())
        eventually(lambda: not rows(name, state="pending").exists())
    assert effect_counts(settings.ALIASES[name]) == {"other": 1}
    assert (tmp_path / "struck").read_text() == "poison: deadly\n" * 2


def hostile(at: Site, chance: random.Random) -> int:
    """Send what nobody has signed; the status."""
    headers = {
        name: "".join(chance.choices("v1,=.tabc0189 é", k=chance.randint(0, 40))).strip()
        for name in chance.sample(
            ["webhook-id", "webhook-timestamp", "webhook-signature", "Content-Type", "X-Odd"], 3
        )
    }
    return at.post(chance.randbytes(chance.randint(0, 300)), headers)


@pytest.mark.parametrize("deliveries", sizes(100, 300, "WEBHOOK_DELIVERIES"))
@pytest.mark.parametrize("name", list(settings.ALIASES))
def test_storm(name: str, deliveries: int, tmp_path: Path) -> None:
    """Deliveries come several times, in any order, among hostile ones, to processes that die.

    There is one effect for each message, nothing else is stored, and no 5xx but 503 is sent.
    """
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
                told.update(at.until_accepted(job, body_of()))
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
        eventually(lambda: not rows(name, state="pending").exists())
    assert {*told} <= {200, 503, 0}
    assert {*refused} <= {400, 401, 413, 0}
    assert effect_counts(settings.ALIASES[name]) == {f"m-{at}": 1 for at in range(number)}
    assert Counter(rows(name).values_list("state", flat=True)) == {"done": number}
