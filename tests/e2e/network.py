"""A network that loses, delays and repeats requests, and replies to some of them itself."""

from __future__ import annotations

import asyncio
import random
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final
from urllib.parse import urlsplit

FAULTS: Final = {
    "none": 60,
    "cut before": 6,
    "cut after": 6,
    "cut within": 6,
    "short delay": 4,
    "long delay": 1,
    "duplicate": 5,
    "500 before": 3,
    "500 after": 2,
    "503 before": 3,
    "503 after": 2,
    "409 before": 2,
}
"""How frequent each is; "before" and "after" the server."""

LONG_DELAY: Final = 1.2  # seconds, longer than the clients' timeout


class Network:
    """Passes requests on to a server.

    ``requests`` is how many have arrived here, and ``faults`` is what became of them.
    """

    def __init__(self, upstream: str, seed: int) -> None:
        self.url = ""
        self.faults: Counter[str] = Counter()
        self._open: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._upstream = urlsplit(upstream)
        self._names, self._weights = list(FAULTS), list(FAULTS.values())
        self._random = random.Random(seed)

    @property
    def requests(self) -> int:
        return self.faults.total()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection: one request after the other."""
        task = asyncio.current_task()
        assert task
        self._open[task] = writer  # the loop would forget the task while it waits
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while request := await _message(reader):
                [fault] = self._random.choices(self._names, self._weights)
                self.faults[fault] += 1
                response = await self._respond(fault, request)
                writer.write(response)
                await writer.drain()
                if fault.startswith("cut"):
                    break
        await _closed(writer)
        del self._open[task]

    async def end(self) -> None:
        """Close all connections, and finish what is under way."""
        for writer in self._open.values():
            writer.close()
        await asyncio.gather(*self._open)

    async def _respond(self, fault: str, request: bytes) -> bytes:
        what, _, when = fault.partition(" ")
        if what == "duplicate":
            return (await asyncio.gather(self._forward(request), self._forward(request)))[1]
        if when == "delay":
            await asyncio.sleep(LONG_DELAY if what == "long" else 0.02)
        response = b"" if when == "before" else await self._forward(request)
        if what == "cut":
            return response[: len(response) - 10] if when == "within" else b""
        return _refusal(int(what)) if what.isdigit() else response

    async def _forward(self, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(self._upstream.hostname, self._upstream.port)
        try:
            writer.write(request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
            response = await reader.read()
        finally:
            await _closed(writer)
        return re.sub(rb"(?i)\r\nConnection: close", b"", response, count=1)


async def _closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


async def _message(reader: asyncio.StreamReader) -> bytes:
    """The next request, without headers of its connection; empty: there is none."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""
    length = re.search(rb"(?i)\r\nContent-Length: (\d+)", head)
    body = await reader.readexactly(int(length[1])) if length else b""
    return re.sub(rb"(?i)\r\n(Connection|Keep-Alive): [^\r]*", b"", head) + body


def _refusal(status: int) -> bytes:
    wait = "Retry-After: 0\r\n" if status == 409 else ""
    return f"HTTP/1.1 {status} Refused\r\n{wait}Content-Length: 0\r\n\r\n".encode()


@contextmanager
def faulty_network(upstream: str, seed: int = 7) -> Iterator[Network]:
    """A network in a thread of its own; its ``url`` leads to the server through it."""
    network, ready = Network(upstream, seed), threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def run() -> None:
        server = await asyncio.start_server(network.serve, "127.0.0.1", 0, backlog=512)
        network.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready.set()
        await stop.wait()
        server.close()
        await network.end()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    ready.wait()
    try:
        yield network
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
