from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from testproject import ledger as ledgers
from tests.e2e import databases

from .ledger import Ledger
from .processes import migrate
from .state import State

pytest.register_assert_rewrite("tests.faults.recovery")


@pytest.fixture(scope="session")
def postgres_wanted() -> None:
    """The tests are to run on PostgreSQL, with psycopg 3."""
    if "postgres" not in os.environ["TEST_DATABASES"].split(","):
        pytest.skip("postgres is not among TEST_DATABASES")
    if os.environ.get("TEST_PSYCOPG") == "2":
        pytest.skip("the faults are provoked on psycopg 3")


@pytest.fixture(scope="module")
def state(postgres_wanted: None) -> Iterator[State]:
    """A new database with the bank's tables, and a look at what is in it."""
    with databases.postgres() as database:
        migrate(database.url)
        with State(database) as state:
            yield state


@pytest.fixture(scope="session")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    """Somebody else's ledger."""
    with ledgers.running(tmp_path_factory.mktemp("ledger") / "log") as url:
        yield Ledger(url)


@pytest.fixture(scope="module")
def log_of_all(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file for what processes say that serve several tests."""
    log = tmp_path_factory.mktemp("faults") / "log"
    log.touch()
    return log


@pytest.fixture
def shown(log_of_all: Path) -> Iterator[None]:
    """What they say during this test is shown when it fails."""
    seen = log_of_all.stat().st_size
    yield
    print(log_of_all.read_text(errors="replace")[seen:][-8000:])


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    """The file for what the bank's processes say; it is shown when the test fails."""
    log = tmp_path / "log"
    log.touch()
    yield log
    print(log.read_text(errors="replace")[-8000:])
