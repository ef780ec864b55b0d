"""A ledger, which is somebody else's service: it enters once what it is told under one key."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Ledger:
    """What it was told; ``url`` is where to tell it."""

    def __init__(self) -> None:
        self.url = ""
        self._lock = threading.Lock()
        self._entries: dict[str, int] = {}
        self._calls: Counter[tuple[str, str]] = Counter()

    def enter(self, key: str, reference: str) -> int:
        """The number of the entry with that key, made now or before."""
        with self._lock:
            self._calls[reference, key] += 1
            return self._entries.setdefault(key, len(self._entries) + 1)

    def entries(self, reference: str) -> int:
        """How many entries a reference has: with how many keys it came."""
        with self._lock:
            return len([told for told, _ in self._calls if told == reference])

    def calls(self, reference: str) -> int:
        """How often a reference came."""
        with self._lock:
            return sum(times for (told, _), times in self._calls.items() if told == reference)


@contextmanager
def open_ledger() -> Iterator[Ledger]:
    """A ledger that serves HTTP for the length of the block."""
    ledger = Ledger()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            entry = ledger.enter(self.headers["Idempotency-Key"], asked["reference"])
            body = json.dumps({"entry": entry}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        ledger.url = f"http://127.0.0.1:{server.server_port}/"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield ledger
        finally:
            server.shutdown()
            thread.join()
