"""A wire to PostgreSQL that breaks where something is being committed.

Who sends a COMMIT and loses the connection does not know whether it was done: the wire breaks
before the statement arrives, or after it was done and before that is told.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any
from urllib.parse import urlsplit

from .wires import Way, Wire, wire_to

IDLE = b"I"
READY = b"Z"
COMMITS_BY_ITSELF = ("INSERT", "UPDATE", "DELETE")


@dataclass(frozen=True)
class Cut:
    """Break the connection at the commit of that number, ``done`` or not."""

    number: int
    done: bool


class WatchedWay(Way):
    """A connection whose messages are read, if it is the one to watch."""

    def __init__(self, wire: Proxy, client: socket.socket, server: socket.socket) -> None:
        super().__init__(wire, client, server)
        self._watched = wire.take()
        self._status = b""  # of the server's transaction, as it last said
        self._ends_when_ready = False

    def forth(self) -> None:
        with self.client.makefile("rb") as sent:
            if not (length := sent.read(4)):  # of the first message, which has no type
                return
            self.server.sendall(length + sent.read(struct.unpack("!i", length)[0] - 4))
            while message := _message(sent):
                cut = self._strike(message)
                if cut and not cut.done:
                    self.wire.was_cut.set()
                    return
                self._ends_when_ready = bool(cut)
                self.server.sendall(message)

    def back(self) -> None:
        with self.server.makefile("rb") as said:
            while message := _message(said):
                if message[:1] == READY:
                    self._status = message[5:6]
                    if self._ends_when_ready:
                        self.wire.was_cut.set()
                        return
                if not self._ends_when_ready:
                    self.client.sendall(message)

    def _strike(self, message: bytes) -> Cut | None:
        statement = _statement(message) if self._watched else ""
        alone = statement.startswith(COMMITS_BY_ITSELF) and self._status == IDLE
        commits = statement.rpartition(";")[2].strip() == "COMMIT"  # maybe with another one
        return self.wire.strike(statement) if alone or commits else None


class Proxy(Wire):
    """Watches the commits in what is sent."""

    way = WatchedWay

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.commits: list[str] = []
        self.was_cut = threading.Event()
        self._cut: Cut | None = None
        self._taken = 0

    def watch(self, cut: Cut | None = None) -> None:
        """Count the commits of the next connection, and break it at one of them, or at none.

        A heartbeat, which comes when it comes, has another connection.
        """
        with self._lock:
            self.commits, self._cut, self._taken = [], cut, 0
            self.was_cut.clear()

    def strike(self, statement: str) -> Cut | None:
        """Note a commit; whether the connection is to break there."""
        with self._lock:
            self.commits.append(statement)
            if self._cut and len(self.commits) - 1 == self._cut.number:
                return self._cut
            return None

    def take(self) -> bool:
        """Whether the connection that is taken now is the one to watch."""
        with self._lock:
            self._taken += 1
            return self._taken == 1


def _message(stream: IO[bytes]) -> bytes:
    """The next message: its type, its length, its content; empty at the end."""
    head = stream.read(5)
    if len(head) < 5:
        return b""
    return head + stream.read(struct.unpack("!i", head[1:])[0] - 4)


def _statement(message: bytes) -> str:
    """The statement in a message that brings one, by the simple protocol or the extended one."""
    content = message[5:]
    if message[:1] == b"P":
        content = content.partition(b"\0")[2]
    elif message[:1] != b"Q":
        return ""
    return content.partition(b"\0")[0].decode(errors="replace")


@contextmanager
def proxy_to(url: str) -> Iterator[Proxy]:
    """A proxy before the database of that URL, for the length of the block."""
    plain = urlsplit(url)._replace(query="sslmode=disable").geturl()
    with wire_to(plain, Proxy) as proxy:
        yield proxy
