"""Handlers that are wrong are found, and those that are right pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.nightly import first_database
from tests.testing.chaos import handlers
from tests.testing.chaos.handlers import calls, effects, message
from tests.testing.chaos.harness import Report, chaos

pytestmark = [pytest.mark.nightly, pytest.mark.django_db(transaction=True, databases="__all__")]


@pytest.fixture(autouse=True)
def _forget() -> None:
    handlers.provider.forget()


def whats(report: Report) -> set[str]:
    """The first words of what happened where something was wrong."""
    return {trial.what.split(" ")[0] for trial in report.failures}


@pytest.mark.parametrize(
    ("handler", "count"),
    [(handlers.unique_name, effects), (handlers.derived_key, calls)],
)
def test_right(database: str, handler: Callable[[str], None], count: Callable[[str], int]) -> None:
    """A handler that is right has one effect per message, whatever happens to its processes."""
    report = chaos(handler, message, count)
    report.assert_passed()
    assert report.effects == {1}
    assert report.kills == len(report.boundaries)


@first_database("database")
@pytest.mark.parametrize(
    ("handler", "count", "disturbance", "found"),
    [
        (handlers.looks_first, effects, "pause", {2}),
        (handlers.marks_first, effects, "kill", {0}),
        (handlers.no_key, calls, "lose", {2}),
        (handlers.marks_last, effects, "kill", {2}),
        (handlers.remembers, effects, "kill", {2}),
        (handlers.no_key, calls, "kill", {2}),
        (handlers.no_key, calls, "pause", {2}),
    ],
)
def test_wrong(
    database: str,
    handler: Callable[[str], None],
    count: Callable[[str], int],
    disturbance: str,
    found: set[int],
) -> None:
    """A handler that is wrong loses or doubles an effect, and the report shows where."""
    report = chaos(handler, message, count, disturbances=[disturbance])
    assert report.failures
    assert report.effects == {1} | found
    assert {trial.effects for trial in report.failures} <= found


def test_lock_that_stays(database: str) -> None:
    """A message that nobody can handle any more is reported as never acknowledged."""
    report = chaos(handlers.locks, message, effects, disturbances=["kill"], attempts=1)
    assert {trial.error for trial in report.failures} == {"RuntimeError: Somebody is handling it."}
