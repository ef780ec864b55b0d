from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from testproject import ledger
from testproject.server import ROOT, running
from tests.support.servers import valkey

from . import databases
from .clients import Api, Order
from .databases import Database

WORKERS = 4
LEASE = "2"  # seconds, so that a test need not wait for long
SMOKE = "test_endpoints.py"
"""What `make test` runs on each database. Above the database it is the same on all, so that it runs
the rest on the first one, and `make nightly` runs all on each.
"""
DATABASES = [
    name for name in ("postgres", "mariadb", "sqlite") if name in os.environ["TEST_DATABASES"]
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave to the night what is no smoke test, on the other databases."""
    for item in items:
        if item.path.parent != Path(__file__).parent or item.path.name == SMOKE:
            continue
        params = getattr(getattr(item, "callspec", None), "params", {})
        if params.get("database") in DATABASES[1:]:
            item.add_marker(pytest.mark.nightly)


@dataclass(frozen=True)
class Server:
    """The reference app, running."""

    url: str
    log: Path
    database: Database
    ledger_url: str

    def bookings(self, order: Order) -> tuple[int, int]:
        """How often the ledger was called for what a transfer asks for, and how often it booked."""
        asked = {"reference": order.reference}
        url = f"{self.ledger_url}/calls"
        told = httpx.get(url, params=asked, verify=False).raise_for_status().json()
        return told["calls"], told["effects"]

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


@pytest.fixture(scope="session", params=DATABASES)
def database(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Database]:
    """A new database on each kind of server that the tests run on."""
    made = {
        "postgres": databases.postgres,
        "mariadb": databases.mariadb,
        "sqlite": lambda: databases.sqlite(tmp_path_factory.mktemp("sqlite")),
    }
    with made[request.param]() as database:
        yield database


@pytest.fixture(scope="session")
def ledger_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The ledger that all servers book their transfers in."""
    with ledger.running(tmp_path_factory.mktemp("ledger") / "log") as url:
        yield url


Serve = Callable[..., AbstractContextManager[Server]]


@pytest.fixture(scope="session")
def serve(database: Database, ledger_url: str, tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Serves the reference app on that database, where faults can be simulated."""

    @contextmanager
    def serve(**environment: str) -> Iterator[Server]:
        log = tmp_path_factory.mktemp("server") / "log"
        given = {
            "DATABASE_URL": database.url,
            "LEDGER_URL": ledger_url,
            "LEASE_SECONDS": LEASE,
            "SIMULATE": "1",
            "WORKERS": str(WORKERS),
            **dict.fromkeys(("ASGI", "BROKER_URL", "CACHED", "DIALECT", "REDIS_URL"), ""),
            **environment,
        }
        with running(log, **given) as url:
            yield Server(url, log, database, given["LEDGER_URL"])

    return serve


@pytest.fixture(scope="session")
def server(serve: Serve) -> Iterator[Server]:
    """The reference app under gunicorn's threads."""
    with serve() as server:
        yield server


@pytest.fixture(scope="session")
def asgi_server(serve: Serve) -> Iterator[Server]:
    """The same under ASGI."""
    with serve(ASGI="1") as server:
        yield server


@pytest.fixture(scope="session")
def stripe_server(serve: Serve) -> Iterator[Server]:
    """The same with the errors of Stripe's API."""
    with serve(DIALECT="stripe") as server:
        yield server


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    with valkey() as server:
        yield server.url


@pytest.fixture(scope="session")
def redis_server(serve: Serve, valkey_url: str) -> Iterator[Server]:
    """The same with the records in Valkey. No lease ends by itself during a test."""
    with serve(REDIS_URL=valkey_url, LEASE_SECONDS="600") as server:
        yield server


@pytest.fixture(scope="session")
def cached_server(serve: Serve, valkey_url: str) -> Iterator[Server]:
    """The same with the records in the database, and their responses in Valkey too."""
    with serve(REDIS_URL=valkey_url, CACHED="1") as server:
        yield server


@pytest.fixture
def api(server: Server) -> Iterator[Api]:
    """A client; what the server logs meanwhile is shown when the test fails."""
    with client_of(server) as api:
        yield api


@contextmanager
def client_of(server: Server) -> Iterator[Api]:
    """The same of any server."""
    seen = server.log.stat().st_size
    api = Api(server.url)
    yield api
    api.close()
    with server.log.open("rb") as log:
        log.seek(seen)
        print(log.read().decode(errors="replace"))
