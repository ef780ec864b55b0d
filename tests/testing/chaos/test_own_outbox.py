"""Publish, relay, consume: killed and paused at every statement and call, on every database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from tests.testing.chaos import flows
from tests.testing.chaos.conftest import some_trials
from tests.testing.chaos.harness import Report, chaos

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.nightly,
    pytest.mark.django_db(transaction=True, databases="__all__"),
]


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    flows.broker.forget()


@some_trials
@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "ungrouped"])
def test_outbox(
    database: str, grouped: bool, trials: int, survives: Callable[[Report], None]
) -> None:
    """An order and what its consumers do of it are there once, wherever a process dies."""
    report = chaos(
        partial(flows.order, grouped=grouped),
        lambda number: f"order-{number}",
        flows.counts,
        limit=trials or None,
    )
    survives(report)
