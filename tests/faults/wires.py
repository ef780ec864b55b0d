"""A wire to a server that can be cut or fall silent at any moment, whatever is spoken over it."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

CHUNK = 65536


class Wire:
    """Passes on what is sent; ``port`` leads through it."""

    def __init__(self, target: tuple[str, int], port: int) -> None:
        self.port = port
        self._target = target
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._silent: set[tuple[socket.socket, socket.socket]] = set()
        self._lock = threading.Lock()

    def fall_silent(self) -> None:
        """Pass on nothing more over the connections there are, and close none of them."""
        with self._lock:
            self._silent |= self._pairs

    def cut(self, chance: random.Random) -> None:
        """Break the connections there are: all of them, or each with an even chance."""
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs if chance.random() < 0.3 else [p for p in pairs if chance.random() < 0.5]:
            _shut(pair)

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

    def cut_all(self) -> None:
        """Break every connection that there is."""
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            _shut(pair)

    def _lead(self, client: socket.socket) -> None:
        with client:
            try:
                server = socket.create_connection(self._target)
            except OSError:  # it is being restarted
                return
            pair = (client, server)
            with server:
                with self._lock:
                    self._pairs.add(pair)
                back = threading.Thread(target=self._pass_on, args=[server, client, pair])
                back.start()
                self._pass_on(client, server, pair)
                back.join()
                with self._lock:
                    self._pairs.discard(pair)

    def _pass_on(
        self,
        source: socket.socket,
        target: socket.socket,
        pair: tuple[socket.socket, socket.socket],
    ) -> None:
        with suppress(OSError):
            while sent := source.recv(CHUNK):
                if pair not in self._silent:
                    target.sendall(sent)
        if pair not in self._silent:
            _shut(pair)


def _shut(pair: tuple[socket.socket, socket.socket]) -> None:
    for end in pair:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@contextmanager
def wire_to(host: str, port: int) -> Iterator[Wire]:
    """A wire to whatever listens there, for the length of the block."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        wire = Wire((host, port), listener.getsockname()[1])
        thread = threading.Thread(target=wire.serve, args=[listener])
        thread.start()
        try:
            yield wire
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
