"""A small load generator: threads that each keep one HTTP connection open."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from benchmarks.project import order


@dataclass(frozen=True)
class Reply:
    """What came back, and how many seconds after it was asked for."""

    key: str
    status: int
    seconds: float


class Client:
    """Some connections to one server."""

    def __init__(self, port: int, path: str, connections: int) -> None:
        self._path = path
        self._open = [http.client.HTTPConnection("127.0.0.1", port) for _ in range(connections)]
        for connection in self._open:
            connection.connect()

    def close(self) -> None:
        for connection in self._open:
            connection.close()

    def share(self, keys: Sequence[str]) -> list[Reply]:
        """Send one request for each key, divided among the connections."""
        count = len(self._open)
        return self._each([keys[place::count] for place in range(count)], order())

    def at_once(self, key: str, query: str, reference: str) -> list[Reply]:
        """Send the same request over every connection at the same moment."""
        return self._each([[key] for _ in self._open], order(reference), query)

    def _each(self, shares: Sequence[Sequence[str]], body: bytes, query: str = "") -> list[Reply]:
        barrier = threading.Barrier(len(self._open))

        def work(connection: http.client.HTTPConnection, keys: Sequence[str]) -> list[Reply]:
            barrier.wait()
            return [_post(connection, self._path + query, key, body) for key in keys]

        with ThreadPoolExecutor(len(self._open)) as pool:
            return [reply for share in pool.map(work, self._open, shares) for reply in share]


def _post(connection: http.client.HTTPConnection, path: str, key: str, body: bytes) -> Reply:
    headers = {"Content-Type": "application/json", "Idempotency-Key": f'"{key}"'}
    started = time.perf_counter()
    connection.request("POST", path, body, headers)
    response = connection.getresponse()
    response.read()
    return Reply(key, response.status, time.perf_counter() - started)
