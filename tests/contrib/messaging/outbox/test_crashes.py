"""The whole chain, killed at each boundary: publish, relay, consume."""

from __future__ import annotations

import json
import subprocess

import pytest
from django.conf import settings

from tests.support.nightly import nightly, sizes
from tests.support.outside import environment, running

from .test_storm import LONGEST

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.django_db(transaction=True, databases="__all__"),
]


@pytest.mark.parametrize(
    ("mode", "group"),
    [("transactional", "g"), nightly("transactional", ""), nightly("leased", "g")],
    ids=["grouped", "ungrouped", "leased"],
)
@pytest.mark.parametrize("name", list(settings.ALIASES))
@pytest.mark.parametrize("stride", sizes(8, 3, "OUTBOX_STRIDE"))
def test_crash_at_every_boundary(name: str, mode: str, group: str, stride: int) -> None:
    """Wherever a process is killed: one effect where it was published, one where it was consumed.

    ``make test`` takes each eighth boundary; ``OUTBOX_STRIDE=1 make nightly`` takes each.
    """
    crashing = ("-m", "tests.contrib.messaging.outbox.crashing", mode, group, str(stride))
    env = environment(settings.ALIASES[name], LEASE_SECONDS="2")
    with running(*crashing, env=env, stdout=subprocess.PIPE) as process:
        said, _ = process.communicate(timeout=LONGEST)
    counted = json.loads(said)
    once = {"published": 1, "consumed": 1, "messages": 1}
    assert {at: counts for at, counts in counted.items() if counts != once} == {}
    assert len(counted) * stride > 30
