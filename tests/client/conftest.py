"""What the tests of the clients ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from .drivers import DRIVERS, Driver
from .scripted import Scripted, scripted


@pytest.fixture
def server() -> Iterator[Scripted]:
    with scripted() as server:
        yield server


@pytest.fixture(params=DRIVERS)
def make(request: pytest.FixtureRequest) -> Callable[..., Driver]:
    """Makes a client, by its options."""
    return request.param  # type: ignore[no-any-return]
