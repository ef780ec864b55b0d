"""The pytest plugin: ``--idempotency-replay``, its marker, and the fixtures.

It is loaded in every project that installs this package, so it imports no Django. What needs Django
is imported when the option is given, or a fixture is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import pytest

from .. import testing

if TYPE_CHECKING:
    from .faults import Race

OPTION: Final = "idempotency_replay"
OFF: Final = "idempotency_replay_off"
IGNORE: Final = "idempotency_replay_ignore"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option and its setting."""
    group = parser.getgroup("idempotency", "retries of unsafe requests (idempotency-django)")
    group.addoption(
        "--idempotency-replay",
        dest=OPTION,
        action="store_true",
        help="send the unsafe requests of Django's test client twice, and fail tests whose second "
        "request has an effect",
    )
    parser.addini(IGNORE, "tables that a repeated request may write to", type="args")


def pytest_configure(config: pytest.Config) -> None:
    """Load what sends requests twice, if it is wanted."""
    config.addinivalue_line(
        "markers", f"{OFF}: with --idempotency-replay, send the requests of this test once."
    )
    if config.getoption(OPTION):
        config.pluginmanager.import_plugin("idempotency_django.testing.replaying")


@pytest.fixture
def idempotency_race(transactional_db: None) -> Callable[..., Race]:  # noqa: ARG001
    """:func:`idempotency_django.testing.race`, in a test that commits."""
    return testing.race


@pytest.fixture
def idempotency_crash(transactional_db: None) -> Callable[..., Any]:  # noqa: ARG001
    """:func:`idempotency_django.testing.crash`, in a test that commits."""
    return testing.crash
