"""Makes the models known before their tables are made; threads that start together."""

from __future__ import annotations

import pytest

import tests.contrib.concurrency.models  # noqa: F401
from tests.settings import ALIASES
from tests.support.nightly import sizes

DATABASES = sorted({"postgres", "mariadb", "sqlite"} & set(ALIASES))


@pytest.fixture(params=DATABASES)
def using(request: pytest.FixtureRequest) -> str:
    """The alias of each database that the tests run on."""
    return ALIASES[request.param]


@pytest.fixture(params=sizes(8, 30))
def threads(request: pytest.FixtureRequest) -> int:
    """How many race for a row."""
    return int(request.param)
