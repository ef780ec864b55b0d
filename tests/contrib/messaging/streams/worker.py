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
from itertools import count
from typing import Any

import django

from tests.contrib.messaging.forks import Fate, returned

OFFSETS = range(3)


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
        code, _ = returned(lambda fatal=fatal: fallen(f"{name}-{fatal}", fatal))
        # Everything is delivered again.
        told = returned(lambda fatal=fatal: Reader().read(f"{name}-{fatal}", [*OFFSETS]))
        assert told[1]["position"] == OFFSETS[-1], fatal
        if code != -signal.SIGKILL:
            assert code == 0
            return {"boundaries": fatal}
    raise AssertionError


def fallen(name: str, fatal: int) -> None:
    """Read, and die at the boundary with this number."""
    with Fate(fatal).watched():
        Reader().read(name, [*OFFSETS])


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
