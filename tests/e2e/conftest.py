from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from testproject.server import ROOT, running

from . import databases
from .clients import Api
from .databases import Database

WORKERS = 4


@dataclass(frozen=True)
class Server:
    """The reference app, running."""

    url: str
    log: Path
    database: Database

    def shell(self, code: str) -> None:
        """Run code in a process of its own, as an operator would."""
        subprocess.run(
            [sys.executable, "-m", "testproject.manage", "shell", "-v0", "-c", code],
            check=True,
            cwd=ROOT,
            env={
                **os.environ,
                "DATABASE_URL": self.database.url,
                "DJANGO_SETTINGS_MODULE": "testproject.settings",
            },
        )


@pytest.fixture(scope="session", params=["postgres", "mariadb", "sqlite"])
def database(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Database]:
    """A new database on each kind of server that the tests run on."""
    if request.param not in os.environ["TEST_DATABASES"].split(","):
        pytest.skip(f"{request.param} is not among TEST_DATABASES, or not installed")
    made = {
        "postgres": databases.postgres,
        "mariadb": databases.mariadb,
        "sqlite": lambda: databases.sqlite(tmp_path_factory.mktemp("sqlite")),
    }
    with made[request.param]() as database:
        yield database


@pytest.fixture(scope="session")
def server(database: Database, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The reference app under gunicorn on that database, where faults can be simulated."""
    log = tmp_path_factory.mktemp("server") / "log"
    environment = {"DATABASE_URL": database.url, "SIMULATE": "1", "WORKERS": str(WORKERS)}
    with running(log, **environment) as url:
        yield Server(url, log, database)


@pytest.fixture
def api(server: Server) -> Iterator[Api]:
    """A client; what the server logs meanwhile is shown when the test fails."""
    seen = server.log.stat().st_size
    api = Api(server.url)
    yield api
    api.close()
    with server.log.open("rb") as log:
        log.seek(seen)
        print(log.read().decode(errors="replace"))
