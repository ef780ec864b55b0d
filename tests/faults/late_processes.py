"""The worker processes as a test sees them, and the places where they keep their records."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from redis import Redis

from idempotency_django.contrib.redis import RedisStore
from idempotency_django.models import IdempotencyKey
from idempotency_django.stores import Store, derived_key
from idempotency_django.stores.database import DatabaseStore
from idempotency_django.testing import PATIENCE, eventually
from tests.models import Effect
from tests.support.outside import environment, running
from tests.support.servers import valkey

DATABASES = ("postgres", "mariadb")
PLACES = (*DATABASES, "redis")
SCOPE = "global"  # of what the workers do
PROGRAM = "import django; django.setup(); from tests.faults.late_worker import main; main()"


@dataclass(frozen=True)
class Place:
    """Where records are kept, and in which database the effects are counted.

    Attributes:
        name: ``postgres``, ``mariadb`` or ``redis``.
        alias: of the database of the effects.
        store: the store, in the process of the test.
        cache: the URL of Redis, where it is that.
    """

    name: str
    alias: str
    store: Store
    cache: str = ""

    @property
    def is_database(self) -> bool:
        """Whether effects and records are in one database."""
        return not self.cache

    @property
    def path(self) -> str:
        """Where to do something once, in the best way that there is here."""
        return "/leased/atomic/" if self.is_database else "/leased/outside/"

    def done(self, key: str) -> int:
        """How often what that path does was really done for a key."""
        if self.is_database:
            return self.effects(key)
        found = self.store.get(key, SCOPE)
        assert found is not None
        derived = derived_key(scope=SCOPE, key=key, fingerprint=found.fingerprint, name="charge")
        return self.effects(derived)

    def effects(self, reference: str) -> int:
        """How often there is such an effect."""
        return Effect.objects.using(self.alias).filter(reference=reference).count()

    def row(self, key: str) -> IdempotencyKey:
        """The record of a key, where it is a row."""
        return IdempotencyKey.objects.using(self.alias).get(key=key)

    def worker(self, folder: Path, **given: Any) -> AbstractContextManager[Worker]:
        """A worker process that keeps its records here."""
        given |= {"store": "redis", "cache": self.cache} if self.cache else {"store": "database"}
        return worker(environment(self.alias) | given.pop("environment", {}), folder, **given)


@contextmanager
def place(name: str) -> Iterator[Place]:
    """One of the places; the test is skipped, and says so, where it is not there."""
    if name == "redis":
        with valkey() as server, Redis.from_url(server.url) as client:
            # As the workers' cache names its keys, which has neither a KEY_PREFIX nor a VERSION.
            named = ":1:idempotency"
            store = RedisStore("late", connection_factory=lambda: client, prefix=named)
            yield Place(name, "default", store, server.url)
    elif name in settings.ALIASES:
        alias = settings.ALIASES[name]
        yield Place(name, alias, DatabaseStore("late", using=alias))
    else:
        pytest.skip(f"{name} is not among TEST_DATABASES, or not installed")


@dataclass
class Worker:
    """A process that runs :mod:`tests.faults.late_worker`."""

    process: subprocess.Popen[str]
    log: Path
    _lines: queue.Queue[str] = field(default_factory=queue.Queue)

    def __post_init__(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def tells(self, what: str) -> Any:
        """Wait for what it tells next, which must be that."""
        line = self._lines.get(timeout=PATIENCE)
        event = json.loads(line) if line else {}
        assert what in event, f"{event or 'It ended'} instead of {what}: {self.log.read_text()}"
        return event[what]

    def begin(self, do: str, *arguments: Any, **options: Any) -> None:
        """Tell it to do something."""
        self._write(json.dumps({"do": do, "arguments": arguments, **options}))

    def do(self, do: str, *arguments: Any, **options: Any) -> Any:
        """Tell it to do something, and wait for the response."""
        self.begin(do, *arguments, **options)
        return self.tells("response")

    def go_on(self) -> None:
        """End its waiting."""
        self._write("go on")

    def post_until(self, status: int, path: str, key: str) -> dict[str, Any]:
        """Retry, as an honest client does, until the response is that; others say 409."""
        responses: list[dict[str, Any]] = []

        def responded() -> bool:
            responses[:] = [self.do("post", path, key)]
            assert responses[0]["status"] in (status, 409), responses
            return bool(responses[0]["status"] == status)

        eventually(responded)
        return responses[0]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Wait until it has paused itself; it goes on after the block."""
        options = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        eventually(lambda: os.waitid(os.P_PID, self.process.pid, options))
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def until_dead(self) -> None:
        """Wait until it is gone."""
        self.process.wait(PATIENCE)

    def _write(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()


@contextmanager
def worker(given: dict[str, str], folder: Path, **worker_settings: Any) -> Iterator[Worker]:
    """A worker process in that environment; see :mod:`tests.faults.late_settings`."""
    given |= {
        "DJANGO_SETTINGS_MODULE": "tests.faults.late_settings",
        "TEST_WORKER": json.dumps(worker_settings),
    }
    log = folder / f"worker-{os.urandom(4).hex()}"
    options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    # The system hangs up on a whole group of processes, this one's, when the shell that started it
    # ends while one of them is paused.
    options["start_new_session"] = True
    with (
        log.open("w") as errors,
        running("-c", PROGRAM, env=given, stderr=errors, **options) as process,
    ):
        try:
            yield Worker(process, log)
        finally:
            process.send_signal(signal.SIGCONT)  # it could not end while it is paused


@contextmanager
def started(workers: Iterable[AbstractContextManager[Worker]]) -> Iterator[list[Worker]]:
    """Several worker processes, all of which are ready."""
    with ExitStack() as stack:
        entered = [stack.enter_context(each) for each in workers]
        for each in entered:
            each.tells("ready")
        yield entered
