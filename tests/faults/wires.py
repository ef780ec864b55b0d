"""A wire to a server that can be cut or fall silent at any moment, whatever is spoken over it."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

CHUNK = 65536


class Way:
    """A connection over a wire, with a thread for each direction."""

    def __init__(self, wire: Any, client: socket.socket, server: socket.socket) -> None:
        self.wire, self.client, self.server = wire, client, server
        self.is_silent = False

    def lead(self) -> None:
        """Pass on what comes, until one end closes; then the other one is closed, too."""
        back = threading.Thread(target=self._until_closed, args=[self.back])
        back.start()
        self._until_closed(self.forth)
        back.join()

    def forth(self) -> None:
        """Pass on what the client sends."""
        self._pass_on(self.client, self.server)

    def back(self) -> None:
        """Pass on what the server sends."""
        self._pass_on(self.server, self.client)

    def shut(self) -> None:
        """Break the connection."""
        for end in (self.client, self.server):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        while sent := source.recv(CHUNK):
            if not self.is_silent:
                target.sendall(sent)

    def _until_closed(self, direction: Callable[[], None]) -> None:
        with suppress(OSError):
            direction()
        if not self.is_silent:
            self.shut()


class Wire:
    """Passes on what is sent; ``url`` leads through it."""

    way: type[Way] = Way

    def __init__(self, target: tuple[str, int], url: str) -> None:
        self.url = url
        self._target = target
        self._ways: set[Way] = set()
        self._lock = threading.Lock()

    def fall_silent(self) -> None:
        """Pass on nothing more over the connections there are, and close none of them."""
        for way in self._now():
            way.is_silent = True

    def cut(self, chance: random.Random) -> None:
        """Break the connections there are: all of them, or each with an even chance."""
        ways = self._now()
        for way in ways if chance.random() < 0.3 else [w for w in ways if chance.random() < 0.5]:
            way.shut()

    def cut_all(self) -> None:
        """Break every connection that there is."""
        for way in self._now():
            way.shut()

    def serve(self, listener: socket.socket) -> None:
        """Take connections until the listener is shut down; return when they are closed."""
        threads = []
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                threads.append(threading.Thread(target=self._lead, args=[client]))
                threads[-1].start()
        self.cut_all()
        for thread in threads:
            thread.join()

    def _now(self) -> list[Way]:
        with self._lock:
            return [*self._ways]

    def _lead(self, client: socket.socket) -> None:
        with client:
            try:
                server = socket.create_connection(self._target)
            except OSError:  # it is being restarted
                return
            with server:
                way = self.way(self, client, server)
                with self._lock:
                    self._ways.add(way)
                way.lead()
                with self._lock:
                    self._ways.discard(way)


@contextmanager
def wire_to(url: str, kind: type[Wire] = Wire) -> Iterator[Any]:
    """A wire to whatever has that URL, for the length of the block."""
    at = urlsplit(url)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        login, found, _ = at.netloc.rpartition("@")
        netloc = f"{login}{found}127.0.0.1:{listener.getsockname()[1]}"
        wire = kind((at.hostname or "", at.port or 0), at._replace(netloc=netloc).geturl())
        thread = threading.Thread(target=wire.serve, args=[listener])
        thread.start()
        try:
            yield wire
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
