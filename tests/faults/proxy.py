"""A way to PostgreSQL that breaks where something is being committed.

Who sends a COMMIT and loses the connection does not know whether it was done: the way breaks before
the statement arrives, or after it was done and before that is told.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO
from urllib.parse import urlsplit

IDLE = b"I"
READY = b"Z"
COMMITS_BY_ITSELF = ("INSERT", "UPDATE", "DELETE")


@dataclass(frozen=True)
class Cut:
    """Break the connection at the commit of that number, ``done`` or not."""

    number: int
    done: bool


class Proxy:
    """Passes on what is sent, and watches the commits in it; ``url`` leads through it."""

    def __init__(self, target: tuple[str, int], url: str) -> None:
        self.url = url
        self.commits: list[str] = []
        self.was_cut = threading.Event()
        self._target = target
        self._cut: Cut | None = None
        self._taken = 0
        self._lock = threading.Lock()

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

    def _take(self) -> bool:
        """Whether the connection that is taken now is the one to watch."""
        with self._lock:
            self._taken += 1
            return self._taken == 1

    def serve(self, listener: socket.socket) -> None:
        """Take connections until the listener is shut down; return when they are closed."""
        ways = []
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(self._target)
                way = threading.Thread(target=_Way(self, client, server, self._take()).lead)
                way.start()
                ways.append(way)
        for way in ways:
            way.join()


class _Way:
    """One connection through the proxy, with a thread for each direction."""

    def __init__(
        self, proxy: Proxy, client: socket.socket, server: socket.socket, watched: bool
    ) -> None:
        self._proxy = proxy
        self._watched = watched
        self._client = client
        self._server = server
        self._status = b""  # of the server's transaction, as it last said
        self._ends_when_ready = False

    def lead(self) -> None:
        """Pass on what comes, until one end closes."""
        with self._client, self._server:
            back = threading.Thread(target=self._back)
            back.start()
            self._forth()
            back.join()

    def _forth(self) -> None:
        with self._closing(), self._client.makefile("rb") as sent:
            length = sent.read(4)  # of the first message, which has no type
            self._server.sendall(length + sent.read(struct.unpack("!i", length)[0] - 4))
            while message := _message(sent):
                cut = self._strike(message)
                if cut and not cut.done:
                    self._proxy.was_cut.set()
                    return
                self._ends_when_ready = bool(cut)
                self._server.sendall(message)

    def _back(self) -> None:
        with self._closing(), self._server.makefile("rb") as said:
            while message := _message(said):
                if message[:1] == READY:
                    self._status = message[5:6]
                    if self._ends_when_ready:
                        self._proxy.was_cut.set()
                        return
                if not self._ends_when_ready:
                    self._client.sendall(message)

    def _strike(self, message: bytes) -> Cut | None:
        statement = _statement(message) if self._watched else ""
        alone = statement.startswith(COMMITS_BY_ITSELF) and self._status == IDLE
        commits = statement.rpartition(";")[2].strip() == "COMMIT"  # maybe with another one
        return self._proxy.strike(statement) if alone or commits else None

    @contextmanager
    def _closing(self) -> Iterator[None]:
        """Shut both ends down when one direction is over, so that the other is too."""
        with suppress(OSError, struct.error):
            yield
        for end in (self._client, self._server):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


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
    at = urlsplit(url)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        login = at.netloc.rpartition("@")[0]
        through = at._replace(netloc=f"{login}@127.0.0.1:{port}", query="sslmode=disable")
        proxy = Proxy((at.hostname or "", at.port or 5432), through.geturl())
        thread = threading.Thread(target=proxy.serve, args=[listener])
        thread.start()
        try:
            yield proxy
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
