"""Processes that are killed: what was acknowledged is handled, and has one effect."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from django.conf import settings

from idempotency_django.contrib.messaging.models import InboxMessage
from idempotency_django.testing import eventually
from tests.support.nightly import first_database
from tests.support.shared import effect_counts

from .site import site

pytestmark = [pytest.mark.e2e, pytest.mark.django_db(transaction=True, databases="__all__")]

MOMENTS = ("before the response", "before the effect", "before the commit")


def pending(name: str) -> int:
    """How many messages are not done yet."""
    rows = InboxMessage.objects.using(settings.ALIASES[name])
    return rows.filter(state="pending").count()


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
        eventually(lambda: pending(name) == 0)
    assert effect_counts(settings.ALIASES[name]) == dict.fromkeys(MOMENTS, 1)
    struck = (tmp_path / "struck").read_text().splitlines()
    assert sorted(struck) == sorted(f"{moment}: {moment}" for moment in MOMENTS)


@first_database("name", indirect=False)
def test_poison(name: str, tmp_path: Path) -> None:
    """What kills each process that handles it is counted and dead, and leaves no effect."""
    rows = InboxMessage.objects.using(settings.ALIASES[name])
    with site(name, tmp_path / "struck", MAX_ATTEMPTS="2") as at:
        at.until_accepted("deadly", body_of(kills=True))
        at.until_accepted("other", body_of())
        eventually(lambda: rows.filter(message_id="deadly", state="dead").exists())
        eventually(lambda: pending(name) == 0)
    assert effect_counts(settings.ALIASES[name]) == {"other": 1}
    assert (tmp_path / "struck").read_text() == "poison: deadly\n" * 2
