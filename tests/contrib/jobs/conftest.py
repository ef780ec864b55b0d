from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import databases
from tests.e2e.databases import Database


@pytest.fixture(scope="session")
def postgres_wanted() -> None:
    """The tests are to run on PostgreSQL, with psycopg 3."""
    if "postgres" not in os.environ["TEST_DATABASES"].split(","):
        pytest.skip("postgres is not among TEST_DATABASES")
    if os.environ.get("TEST_PSYCOPG") == "2":
        pytest.skip("the workers use psycopg 3")


@pytest.fixture
def database(postgres_wanted: None) -> Iterator[Database]:
    with databases.postgres() as database:
        yield database


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    """The file for what the workers say; its end is shown when the test fails."""
    log = tmp_path / "log"
    log.touch()
    yield log
    print(log.read_text(errors="replace")[-20000:])
