"""A way to servers that are further off: a process that hands on what it is sent, later.

``python -m benchmarks.relay 0.00025 127.0.0.1:5432 127.0.0.1:6379`` listens at one port for each of
these servers, and delays each direction by a quarter of a millisecond. It writes its ports as one
line of JSON. For each line that it reads, it writes what it has handed on to each server so far.
It ends with its input.
"""

from __future__ import annotations

import ctypes
import json
import select
import socket
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

CHUNK: Final = 64 * 1024
AWAKE: Final = 0.0001  # seconds before something is due; who sleeps to the end wakes up late
SET_TIMER_SLACK: Final = 29  # PR_SET_TIMERSLACK of <linux/prctl.h>
Address = tuple[str, int]
Traffic = dict[str, int]
"""The messages and the bytes that a server was sent."""


@dataclass(eq=False)
class Side:
    """One end of a relayed connection."""

    socket: socket.socket
    traffic: Traffic | None = None  # of the server, where this is its client
    other: Side = field(init=False)
    spoke_last: bool = False
    told: bool = False  # that the other one has ended


class Relay:
    """Listens for some servers, and hands on with a delay in seconds.

    One thread does it all, in one `select` whose timeout is exact to the microsecond; asyncio's
    is exact to the millisecond.
    """

    def __init__(self, delay: float, servers: list[Address]) -> None:
        self._delay = delay
        self._listeners = {socket.create_server(("127.0.0.1", 0)): server for server in servers}
        self._traffic = {server: {"messages": 0, "bytes": 0} for server in servers}
        self._sides: dict[socket.socket, Side] = {}
        self._late: deque[tuple[float, Side, bytes]] = deque()  # one delay: the first is due first

    def run(self) -> None:
        """Work until the standard input ends."""
        self._say([listener.getsockname()[1] for listener in self._listeners])
        while True:
            for ready in self._wait():
                if ready is sys.stdin:
                    if not sys.stdin.readline():
                        return
                    self._say(list(self._traffic.values()))
                elif ready in self._listeners:
                    self._accept(ready)
                else:
                    self._take(self._sides[ready])
            self._send()

    def _wait(self) -> list[Any]:
        timeout = None
        if self._late:
            timeout = max(0, self._late[0][0] - AWAKE - time.monotonic())
        sources = [sys.stdin, *self._listeners, *self._sides]
        return select.select(sources, [], [], timeout)[0]

    def _accept(self, listener: socket.socket) -> None:
        address = self._listeners[listener]
        client = Side(listener.accept()[0], self._traffic[address])
        server = Side(socket.create_connection(address))
        client.other, server.other = server, client
        for side in (client, server):
            side.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sides[side.socket] = side

    def _take(self, side: Side) -> None:
        due = time.monotonic() + self._delay
        try:
            data = side.socket.recv(CHUNK)
        except ConnectionError:
            data = b""
        if data:
            self._count(side, len(data))
        else:
            del self._sides[side.socket]  # it has nothing more to say
        self._late.append((due, side.other, data))

    def _count(self, side: Side, size: int) -> None:
        """What a client sends until the server replies is one message, in however many parts."""
        if side.traffic is not None:
            side.traffic["bytes"] += size
            side.traffic["messages"] += not side.spoke_last
        side.spoke_last, side.other.spoke_last = True, False

    def _send(self) -> None:
        while self._late and self._late[0][0] <= time.monotonic():
            _, side, data = self._late.popleft()
            with suppress(OSError):
                if data:
                    side.socket.sendall(data)
                else:
                    self._end(side)

    def _end(self, side: Side) -> None:
        """Tell a side that the other one has ended; close both when both have."""
        side.told = True
        if side.other.told:
            side.socket.close()
            side.other.socket.close()
        else:
            side.socket.shutdown(socket.SHUT_WR)

    def _say(self, value: object) -> None:
        print(json.dumps(value), flush=True)


def main(delay: str, *servers: str) -> None:
    with suppress(AttributeError, OSError):  # Linux wakes sleepers up to 50 µs late otherwise
        ctypes.CDLL(None).prctl(SET_TIMER_SLACK, 1)
    parts = [server.rpartition(":") for server in servers]
    Relay(float(delay), [(host, int(port)) for host, _, port in parts]).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
