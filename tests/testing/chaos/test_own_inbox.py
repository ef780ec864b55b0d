"""Receive and process: killed and paused at every statement and call, on every database."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.testing.chaos import hooks
from tests.testing.chaos.conftest import some_trials
from tests.testing.chaos.harness import Report, chaos

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.nightly,
    pytest.mark.django_db(transaction=True, databases="__all__"),
    pytest.mark.urls(hooks.__name__),
]


@some_trials
def test_webhook(database: str, trials: int, survives: Callable[[Report], None]) -> None:
    """A webhook that was acknowledged is handled once, wherever a process dies or is late."""
    hooks.provider.forget()
    report = chaos(
        hooks.deliver, lambda number: f"msg-{number}", hooks.counts, limit=trials or None
    )
    survives(report)
