"""Many writers, relays that are killed and paused, and a broker that refuses some."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pytest
from django.conf import settings
from django.test import override_settings

from idempotency_django.contrib.messaging import Consumer, Event
from idempotency_django.errors import OperationInProgress
from idempotency_django.testing import in_threads
from tests.models import Effect
from tests.support.nightly import sizes
from tests.support.outside import environment, running

from .storm import Orders

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.django_db(transaction=True, databases="__all__"),
]

SEED = int(os.environ.get("OUTBOX_SEED", "1"))
LONGEST = 600  # seconds
STORE = {"BACKEND": "idempotency_django.stores.database.DatabaseStore"}


@pytest.mark.parametrize("number", sizes(90, 300, "OUTBOX_MESSAGES"))
@pytest.mark.parametrize("name", list(settings.ALIASES))
def test_storm(name: str, number: int, tmp_path: Path) -> None:
    """What is committed is published and nothing else; in order, without gaps, with one effect."""
    alias = settings.ALIASES[name]
    messages = number if name == "postgres" else number // 3
    strikes = max(messages // 10, 5)
    orders = Orders(str(tmp_path / "log"), messages, seed=SEED, strikes=strikes)
    storm = ("-m", "tests.contrib.messaging.outbox.storm", json.dumps(asdict(orders)))
    with running(*storm, env=environment(alias, LEASE_SECONDS="2")) as process:
        assert process.wait(LONGEST) == 0
    events = [Event.from_json(line) for line in Path(orders.log).read_text().splitlines()]

    committed = Effect.objects.using(alias).filter(reference__startswith="committed ")
    wanted = {int(each.split()[1]) for each in committed.values_list("reference", flat=True)}
    assert {event.data["number"] for event in events} == wanted
    assert 0 < len(wanted) < messages
    assert len({event.id for event in events}) == len(wanted)
    numbers: dict[str, list[int]] = defaultdict(list)
    for event in {event.id: event for event in events}.values():  # as each came for the first time
        numbers[str(event.subject)].append(int(event.extensions["sequence"]))
    for group, arrived in numbers.items():
        assert arrived == list(range(1, len(arrived) + 1)), group
    assert _effects(alias, events) == dict.fromkeys(wanted, 1)


def _effects(alias: str, events: list[Event]) -> Counter[int]:
    """How many effects each message has when all events are delivered twice, at the same time."""
    consumer = Consumer("billing")

    @consumer.on("order.paid")
    def book(event: Event, execution: object) -> None:
        Effect.objects.using(alias).create(reference=f"booked {event.data['number']}")

    def deliver() -> None:
        for event in events:
            while True:
                with suppress(OperationInProgress):
                    consumer.handle(event)
                    break

    with override_settings(
        IDEMPOTENCY={"STORES": {"default": {**STORE, "OPTIONS": {"using": alias}}}}
    ):
        in_threads([deliver, deliver])
    booked = Effect.objects.using(alias).filter(reference__startswith="booked ")
    return Counter(int(each.split()[1]) for each in booked.values_list("reference", flat=True))
