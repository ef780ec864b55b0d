"""Requests that leave their work to a Celery task."""

from __future__ import annotations

import pytest

from idempotency_django.testing import eventually

from .clients import Api, Order

pytestmark = pytest.mark.e2e

JOBS = "/api/jobs/"


def test_killed_after_sending(api: Api) -> None:
    """A server that dies when it has sent the task sends it again at the retry, with its id."""
    order = Order()
    api.killed(JOBS, order, "after-effect")
    eventually(lambda: api.send(JOBS, order).status_code != 409)  # when its lease is over
    assert api.send(JOBS, order).status_code == 202
    assert api.effects(order) == 1
