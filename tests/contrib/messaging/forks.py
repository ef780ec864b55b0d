"""Processes that a process forks, once it has loaded everything."""

from __future__ import annotations

import json
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from django.db import connection


def forked(work: Callable[[], object]) -> int:
    """A new process that does it."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            if code:
                traceback.print_exc()
            os._exit(code)
    return process


def returned(work: Callable[[], object]) -> tuple[int, Any]:
    """How a new process ends that does it, and what that returns."""
    reading, writing = os.pipe()
    process = forked(lambda: os.write(writing, json.dumps(work()).encode()))
    os.close(writing)
    with os.fdopen(reading) as pipe:
        reply = pipe.read()
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status), json.loads(reply or "null")


@dataclass
class Fate:
    """Where this process dies: at the boundary with this number; ``None``: nowhere."""

    at: int | None = None
    passed: list[str] = field(default_factory=list)

    def boundary(self, name: str) -> None:
        """A boundary is passed, or the end has come."""
        if len(self.passed) == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.passed.append(name)

    @contextmanager
    def around(self, name: str) -> Iterator[None]:
        """A boundary before it and one after it."""
        self.boundary(f"before {name}")
        yield
        self.boundary(f"after {name}")

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Each statement and each commit has a boundary before and after it."""

        def watch(execute: Callable[..., Any], sql: str, *rest: Any) -> Any:
            with self.around(" ".join(sql.split()[:4])):
                return execute(sql, *rest)

        commit = connection._commit  # type: ignore[attr-defined]

        def watched_commit() -> None:
            with self.around("COMMIT"):
                commit()

        connection._commit = watched_commit  # type: ignore[attr-defined]
        with connection.execute_wrapper(watch):
            yield
        del connection._commit  # type: ignore[attr-defined]
