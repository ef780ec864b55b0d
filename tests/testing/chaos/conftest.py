"""Each database in turn, for handlers and for records."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from django.conf import settings
from django.test import override_settings

from tests.support.nightly import sizes
from tests.testing.chaos.flows import OUTBOX
from tests.testing.chaos.harness import Report
from tests.testing.chaos.routing import To

some_trials = pytest.mark.parametrize("trials", sizes(4, 10, "CHAOS_TRIALS"))
"""How many trials a test of a long flow makes; 0: all of some 80."""


@pytest.fixture(params=settings.ALIASES)
def database(request: pytest.FixtureRequest, transactional_db: None) -> Iterator[str]:
    """The name of a database that everything is on."""
    alias = settings.ALIASES[request.param]
    backend = "idempotency_django.stores.database.DatabaseStore"
    stores = {"default": {"BACKEND": backend, "OPTIONS": {"using": alias}}}
    with override_settings(
        DATABASE_ROUTERS=[To(alias)],
        IDEMPOTENCY={"STORES": stores, "MESSAGING_DATABASE": alias, "OUTBOX": OUTBOX},
    ):
        yield request.param


@pytest.fixture
def survives(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> Callable[[Report], None]:
    """Assert that a report has passed, and say what was done."""

    def check(report: Report) -> None:
        report.assert_passed()
        with capsys.disabled():
            print(f"\n{request.node.name}: {report}")

    return check
