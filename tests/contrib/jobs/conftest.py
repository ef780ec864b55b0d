from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e import databases
from tests.e2e.databases import Database
from tests.faults.conftest import log, postgres_wanted

__all__ = ["log", "postgres_wanted"]  # fixtures


@pytest.fixture
def database(postgres_wanted: None) -> Iterator[Database]:
    with databases.postgres() as database:
        yield database
