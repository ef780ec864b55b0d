"""PostgreSQL crashes and comes back while clients keep sending."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import cycle
from pathlib import Path

import pytest

from idempotency_django.testing import PATIENCE
from tests.e2e.databases import Database
from tests.support.nightly import sizes

from .faulty_servers import Restartable, restartable_postgres
from .ledger import Ledger
from .processes import Ended, Order, Site, migrate, site
from .recovery import (
    DRF,
    LEASED,
    STEPPED,
    TRANSACTIONAL,
    TRANSACTIONAL_REQUEST,
    Mode,
    assert_done_once,
)
from .state import State

pytestmark = pytest.mark.e2e

SITES = {
    "": (TRANSACTIONAL, LEASED, DRF, STEPPED),
    "1": (TRANSACTIONAL_REQUEST,),
}
"""By whether they have ATOMIC_REQUESTS: what is asked of them."""
CLIENTS = 4  # of each site
BETWEEN = 40
"""Operations that get a response before the server crashes again."""


@pytest.fixture(scope="module")
def server(postgres_wanted: None) -> Iterator[Restartable]:
    with restartable_postgres() as server:
        migrate(server.url)
        yield server


class Load:
    """Clients that send one operation after the other, each until it gets a response."""

    def __init__(self) -> None:
        self.responses: dict[Order, tuple[Mode, Ended]] = {}
        self.told: Counter[str] = Counter()
        self._over = threading.Event()
        self._changed = threading.Condition()

    def run(self, site: Site, modes: tuple[Mode, ...]) -> None:
        """One client, which keeps its connection, and so the site's one to the database."""
        with closing(site.connect()) as connection:
            for mode in cycle(modes):
                if self._over.is_set():
                    return
                order = Order(mode.path)
                deadline = time.monotonic() + PATIENCE
                while (ended := site.send(order, connection)).status != 201:
                    self._tell(str(ended.status))
                    assert ended.status in {409, 500, 503}, ended
                    assert time.monotonic() < deadline, ended
                    time.sleep(0.05)  # a polite client
                self._tell("replayed" if ended.replayed else "executed")
                with self._changed:
                    self.responses[order] = mode, ended
                    self._changed.notify_all()

    def wait_for(self, responses: int) -> None:
        """Return when that many more operations have got a response."""
        with self._changed:
            wanted = len(self.responses) + responses
            assert self._changed.wait_for(lambda: len(self.responses) >= wanted, PATIENCE * 2)

    def end(self) -> None:
        """Let each client complete what it is at."""
        self._over.set()

    def _tell(self, what: str) -> None:
        with self._changed:
            self.told[what] += 1


@pytest.mark.parametrize("crashes", sizes(1, 3))
def test_postgres_crashes_under_load(
    server: Restartable,
    crashes: int,
    ledger: Ledger,
    log: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every operation is done once and gets the response that is stored, however often the
    server crashes meanwhile; until then its client is told to come back.
    """
    load = Load()
    with ExitStack() as sites:
        threads = sites.enter_context(ThreadPoolExecutor())
        environment = {"CONN_MAX_AGE": "600"}
        clients = []
        for atomic, modes in SITES.items():
            served = site(server.url, ledger.url, log, ATOMIC_REQUESTS=atomic, **environment)
            one = sites.enter_context(served)
            clients += [threads.submit(load.run, one, modes) for _ in range(CLIENTS)]
        for _ in range(crashes):
            load.wait_for(BETWEEN)
            server.crash_and_restart()
        load.wait_for(BETWEEN)
        load.end()
        for client in clients:
            client.result(PATIENCE)

    _assert_responses_are_stored(server, ledger, log, load)
    with capsys.disabled():
        print(f"\n{crashes} crashes, {len(load.responses)} operations: {dict(load.told)}")


def _assert_responses_are_stored(
    server: Restartable, ledger: Ledger, log: Path, load: Load
) -> None:
    """What a client was told is what a retry is told, and what is stored.

    A response that could not be stored before its lease was over, which is logged, is made again of
    the same steps.
    """
    with (
        State(Database("postgres", server.url, lambda: 0)) as state,
        site(server.url, ledger.url, log) as asked,
    ):
        state.wait_for_end_of_leases()
        for order, (mode, told) in load.responses.items():
            again, stored = asked.send(order), asked.send(order)
            assert (again.status, again.body) == (201, told.body)
            assert (stored.status, stored.replayed, stored.body) == (201, True, told.body)
            if not again.replayed:
                assert mode in {LEASED, STEPPED}
                assert "its result could not be stored" in log.read_text()
            assert_done_once(mode, order, state, ledger)
