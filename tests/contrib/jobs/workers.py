"""Workers of Celery in processes of their own, what they did, and what is left to be done."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from celery import Celery, Signature, states

from tests.e2e.databases import Database
from tests.support.machine import patience
from tests.support.outside import ROOT

PATIENCE = 120.0
"""Seconds after which a test stops waiting for a task."""


@dataclass(frozen=True)
class Jobs:
    """A queue, the workers that serve it, and the database that they work on.

    Args:
        database: where the effects and the records are.
        broker: the broker's URL.
        results_url: the URL of the result backend.
        log: the file for what the workers say.
        lease: seconds.
        visibility: seconds after which Redis delivers again what nobody acknowledged.
        app: the module of the workers' app.
        deduplicate: whether Celery looks at the result backend before it runs a task again.
    """

    database: Database
    broker: str
    results_url: str
    log: Path
    lease: float = 1.0
    visibility: float = 1.0
    deduplicate: bool = False
    app: str = "tests.contrib.jobs.app"
    queue: str = field(default_factory=lambda: f"jobs-{secrets.token_hex(4)}")

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to know."""
        names = ("broker", "results_url", "lease", "visibility", "deduplicate", "queue")
        given = {name: getattr(self, name) for name in names}
        return {
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "tests.contrib.jobs.settings",
            "JOBS": json.dumps({**given, "database": self.database.url}),
        }

    def migrate(self) -> None:
        """Make the tables."""
        command = [sys.executable, "-m", "django", "migrate", "--run-syncdb", "--verbosity=0"]
        subprocess.run(command, check=True, cwd=ROOT, env=self.environment)

    @contextmanager
    def worker(self, processes: int = 8) -> Iterator[subprocess.Popen[bytes]]:
        """A worker with so many processes; it and they are a group, which may have been killed."""
        command = [sys.executable, "-m", "celery", "-A", self.app, "worker", "-l", "INFO"]
        command += ["-n", f"{self.queue}-{secrets.token_hex(2)}@here", "-c", str(processes)]
        command += ["-O", "fair", "--without-gossip", "--without-mingle"]
        with self.log.open("ab") as said:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self.environment,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
            try:
                yield process
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                # What is sent before RabbitMQ has noticed would be delivered again: it is sent to
                # the dead worker first.
                until(lambda: self._queue()[1] == 0)

    def task(self, name: str, *args: object, **options: Any) -> Signature:
        """A task of the app, to be sent."""
        name = f"tests.contrib.jobs.app.{name}"
        return Signature(name, args, options=options, app=self.client)

    def results(self, ids: Iterable[str]) -> list[Any]:
        """The results of tasks, when they are there."""
        ids = list(ids)
        until(lambda: self.are_ready(ids))
        return [self.client.backend.get_result(one) for one in ids]

    def are_ready(self, ids: Iterable[str]) -> bool:
        """Whether all of these tasks have ended."""
        return all(self.client.backend.get_state(one) in states.READY_STATES for one in ids)

    def seconds_of_silence(self) -> float:
        """Seconds since the workers have said anything."""
        return time.time() - self.log.stat().st_mtime

    @cached_property
    def client(self) -> Celery:
        """An app that sends tasks and has none."""
        client = Celery(
            "client", broker=self.broker, backend=self.results_url, set_as_current=False
        )
        client.conf.task_default_queue = self.queue
        # Nobody listens for results, over a connection that outlives the test: they are asked for.
        client.backend.on_task_call = client.backend.remove_pending_result = lambda *_: None
        return client

    def effects(self, reference: str) -> Counter[str]:
        """How often each kind of thing was done."""
        return Counter(
            kind
            for (kind,) in self.rows("SELECT kind FROM bank_effect WHERE reference = %s", reference)
        )

    def rows(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """What is in the database."""
        import psycopg  # not at the top: there is none when the tests run on psycopg2

        with psycopg.connect(self.database.url, autocommit=True) as connection:
            return connection.execute(statement, values).fetchall()

    def deliveries(self) -> Counter[str]:
        """How often each task was delivered, by its id."""
        said = self.log.read_text(errors="replace")
        return Counter(re.findall(r"Task [\w.]+\[([\w-]+)\] received", said))

    def wait_until_idle(self) -> None:
        """Return when nothing is waiting: no message, no copy, no task."""
        quiet = 0
        deadline = time.monotonic() + patience(PATIENCE)
        while quiet < 2:  # what was on its way at the first look is there at the second
            assert time.monotonic() < deadline, "It does not come to rest."
            quiet = 0 if self._is_busy() else quiet + 1

    def _queue(self) -> tuple[int, int]:
        """How many messages wait, and how many consumers RabbitMQ knows; Redis knows of none."""
        with self.client.connection_for_read() as connection:
            try:
                queue = connection.default_channel.queue_declare(self.queue, passive=True)
            except connection.channel_errors:  # for Redis, an empty list does not exist
                return 0, 0
            return queue.message_count, queue.consumer_count

    def _is_busy(self) -> bool:
        waiting, _ = self._queue()
        inspect = self.client.control.inspect(timeout=1)
        kinds = [inspect.active(), inspect.reserved(), inspect.scheduled()]
        tasks = [task for kind in kinds for told in (kind or {}).values() for task in told]
        mine = [task for task in tasks if self.queue in repr(task)]
        return bool(waiting or mine or not all(kinds))


def until(condition: Callable[[], object]) -> None:
    """Wait until the condition holds; it is asked seldom, as other processes need the time."""
    deadline = time.monotonic() + patience(PATIENCE)
    while not condition():
        assert time.monotonic() < deadline, "It did not happen."
        time.sleep(0.1)
