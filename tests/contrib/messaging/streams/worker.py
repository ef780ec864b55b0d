"""A process that reads streams: one order on each line of its input, one reply to each.

An order to ``read`` claims a stream, if need be, and handles offsets. It may name a moment at which
the process stops itself, as if the machine had fallen asleep. An order to ``fall`` has the same
done by children that are killed, each at a later boundary between two statements.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import django

OFFSETS = range(3)


class Boundaries:
    """The points between the statements of this process; it is killed at the one of a number."""

    def __init__(self, fatal: int) -> None:
        self.fatal = fatal
        self.passed = 0

    def pass_(self) -> None:
        if self.passed == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        self.passed += 1

    @contextmanager
    def around(self) -> Iterator[None]:
        self.pass_()
        yield
        self.pass_()

    def watch(self) -> None:
        """Pass a boundary before and after each statement and each COMMIT."""
        from django.db import connection

        usual = connection._commit

        def execute(run: Callable[..., Any], *args: Any) -> Any:
            with self.around():
                return run(*args)

        def commit() -> None:
            with self.around():
                usual()

        connection.execute_wrappers.append(execute)
        connection._commit = commit


class Reader:
    """What one process knows of its streams."""

    def __init__(self) -> None:
        self.streams: dict[str, Any] = {}

    def read(self, name: str, offsets: list[int], stop: str = "", at: int = -1) -> dict[str, Any]:
        """Handle the offsets that are new; where it got to, and the error that ended it."""
        from idempotency_django.contrib.messaging import claim_stream

        error = ""
        if name not in self.streams:
            self.streams[name] = claim_stream(name)
        stream = self.streams[name]
        for offset in offsets:
            if not stream.is_new(offset):
                continue
            try:
                self.handle(stream, offset, stop if offset == at else "")
            except Exception as failed:  # noqa: BLE001  # it is told
                error = type(failed).__name__
                break
        return {"epoch": stream.epoch, "position": stream.position, "error": error}

    def handle(self, stream: Any, offset: int, stop: str) -> None:
        from tests.models import Effect

        pause(stop == "before")
        with stream.advance(to=offset):
            Effect.objects.create(reference=f"{stream.name} {offset}")
            pause(stop == "inside")


def pause(now: bool) -> None:
    """Stop here, until somebody sends SIGCONT."""
    if now:
        reply({"stopped": True})
        os.kill(os.getpid(), signal.SIGSTOP)


def fall(name: str) -> dict[str, Any]:
    """Have children killed at one boundary after the other, until one comes to its end."""
    from django.db import connections

    connections.close_all()  # each child opens its own
    for fatal in count():
        child = os.fork()
        if not child:
            Boundaries(fatal).watch()
            Reader().read(f"{name}-{fatal}", [*OFFSETS])
            os._exit(0)
        _, status = os.waitpid(child, 0)
        survivor = os.fork()  # everything is delivered again
        if not survivor:
            told = Reader().read(f"{name}-{fatal}", [*OFFSETS])
            os._exit(int(told["position"] != OFFSETS[-1]))
        assert os.waitpid(survivor, 0)[1] == 0, fatal
        if not os.WIFSIGNALED(status):
            assert status == 0
            return {"boundaries": fatal}
    raise AssertionError


def reply(told: dict[str, Any]) -> None:
    print(json.dumps(told), flush=True)


def main() -> None:
    django.setup()
    reader = Reader()
    for line in sys.stdin:
        order = json.loads(line)
        do = fall if order.pop("do") == "fall" else reader.read
        reply(do(**order))


if __name__ == "__main__":
    main()
