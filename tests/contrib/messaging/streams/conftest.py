"""The databases that streams are tested on."""

from __future__ import annotations

import pytest

from tests.settings import ALIASES


@pytest.fixture(params=sorted(ALIASES))
def using(request: pytest.FixtureRequest) -> str:
    """The alias of each database that the tests run on."""
    return ALIASES[request.param]
