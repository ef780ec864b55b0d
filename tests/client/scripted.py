"""A server that does as it is told, one instruction for each request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CUT = "the connection is closed instead of a response"
CUT_BODY = "the connection is closed within the response"


@dataclass(frozen=True)
class Reply:
    """A response."""

    status: int = 201
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b"{}"


@dataclass(frozen=True)
class Received:
    """A request."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def key(self) -> str | None:
        return self.headers.get("Idempotency-Key")


class Scripted:
    """``script`` is what it still does; then it responds with 201."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.script: list[Reply | str] = []
        self.received: list[Received] = []

    @property
    def keys(self) -> list[str | None]:
        return [request.key for request in self.received]


@contextmanager
def scripted() -> Iterator[Scripted]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def _serve(self) -> None:
            self.close_connection = True
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            server.received.append(Received(self.command, self.path, dict(self.headers), body))
            reply = server.script.pop(0) if server.script else Reply()
            if isinstance(reply, str) and reply == CUT:
                return
            cut, reply = isinstance(reply, str), reply if isinstance(reply, Reply) else Reply()
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(reply.body) + (100 if cut else 0)))
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(reply.body)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _serve  # noqa: N815

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    server = Scripted(f"http://127.0.0.1:{http.server_address[1]}")
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
