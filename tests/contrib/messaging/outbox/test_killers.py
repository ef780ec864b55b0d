"""A message that kills each process that handles it, where the relay's own process does that."""

from __future__ import annotations

import json
import signal
from datetime import timedelta

import pytest
from django.db import transaction
from django.test import override_settings

from idempotency_django.contrib.messaging import after_commit, publish
from idempotency_django.contrib.messaging.models import OutboxMessage
from idempotency_django.models import DatabaseNow, IdempotencyKey
from tests.contrib.messaging.settling import settle
from tests.models import Effect
from tests.support.nightly import nightly
from tests.support.outside import environment, running

from .killing import OUTBOX, make

pytestmark = [pytest.mark.e2e, pytest.mark.django_db(transaction=True)]

LONGEST = 120  # seconds


def relayed() -> int:
    """Have another process relay what is there, as if all leases were over; how it ended."""
    past = DatabaseNow() - timedelta(days=1)
    OutboxMessage.objects.filter(state="pending").update(process_after=past)
    IdempotencyKey.objects.exclude(lease_expires_at=None).update(lease_expires_at=past)
    relay = ("-m", "tests.contrib.messaging.outbox.relay", json.dumps(OUTBOX))
    with running(*relay, env=environment()) as process:
        return process.wait(LONGEST)


def states() -> dict[str, str]:
    """The state of each message, by what it is."""
    known = {row.payload: row.state for row in OutboxMessage.objects.all()}
    names = ("kills", "works")
    return {name: state for payload, state in known.items() for name in names if name in payload}


@pytest.mark.parametrize(
    ("topic", "group"), [("local", "g"), nightly("local", None), nightly("after_commit", None)]
)
def test_killer(topic: str, group: str | None) -> None:
    """A message whose handler ends the process is dead after max_attempts such ends, and the others
    are handled. An operator's retry is one attempt more.
    """
    with override_settings(IDEMPOTENCY={"OUTBOX": OUTBOX}):
        with transaction.atomic():
            for what in ("kills", "works"):
                if topic == "local":
                    publish(topic, what, type="n", group=group and f"{group}-{what}")
                else:
                    after_commit(make, what)
        ends = [relayed() for _ in range(3)]
        assert ends == [-signal.SIGKILL, -signal.SIGKILL, 0]
        assert states() == {"kills": "dead", "works": "done"}
        assert [*Effect.objects.values_list("reference", flat=True)].count("works") == 1
        if topic == "after_commit":
            message = OutboxMessage.objects.get(state="dead")
            assert "ended its process" in message.error
            settle(message, "retry", by="ann")
            assert [relayed() for _ in range(2)] == [-signal.SIGKILL, 0]
            assert states() == {"kills": "dead", "works": "done"}
