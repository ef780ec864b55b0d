"""An external service: a ledger that makes each booking once for its idempotency key.

``python -m testproject.ledger`` serves at ``LEDGER_PORT`` (8001). The server of the reference app
starts one of its own where ``LEDGER_URL`` names none. It remembers nothing when it ends.

=========================  =======================================================================
``POST /bookings``         book the JSON in the body; needs the header ``Idempotency-Key``. The key
                           again, and the response is the first one again
``GET /calls?key=…``       how often it was called with that key, and what it did:
                           ``{"calls": 2, "effects": 1}``
``GET /calls?reference=…`` the same for a reference
=========================  =======================================================================
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from socketserver import ThreadingMixIn
from threading import Lock, Thread
from typing import IO, Any
from urllib.parse import parse_qs
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

HOST = "127.0.0.1"
BACKLOG = 1024
STOP_TIMEOUT = 30  # seconds; then a process is killed

Said = tuple[HTTPStatus, dict[str, Any]]


@dataclass
class Booking:
    """The booking of a key."""

    reference: str
    response: dict[str, Any]
    calls: int = 0


class Ledger:
    """The WSGI application; its books are in its memory."""

    def __init__(self) -> None:
        self._bookings: dict[str, Booking] = {}
        self._lock = Lock()

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        status, told = self._respond(environ)
        body = json.dumps(told).encode()
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        start_response(f"{status.value} {status.phrase}", headers)
        return [body]

    def _respond(self, environ: dict[str, Any]) -> Said:
        match environ["REQUEST_METHOD"], environ["PATH_INFO"]:
            case "POST", "/bookings":
                return self._book(environ)
            case "GET", "/calls":
                return HTTPStatus.OK, self._counted(parse_qs(environ["QUERY_STRING"]))
        return HTTPStatus.NOT_FOUND, {"detail": "There are /bookings and /calls."}

    def _book(self, environ: dict[str, Any]) -> Said:
        key = environ.get("HTTP_IDEMPOTENCY_KEY", "")
        asked = json.loads(environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)))
        if not key:
            return HTTPStatus.BAD_REQUEST, {"detail": "Send the header Idempotency-Key."}
        with self._lock:
            booking = self._bookings.get(key)
            if booking is None:
                response = {"booking": len(self._bookings) + 1, **asked}
                booking = self._bookings[key] = Booking(asked["reference"], response)
            booking.calls += 1
        return HTTPStatus.CREATED, booking.response

    def _counted(self, query: dict[str, list[str]]) -> dict[str, int]:
        keys, references = query.get("key", []), query.get("reference", [])
        with self._lock:
            found = [
                booking.calls
                for key, booking in self._bookings.items()
                if key in keys or booking.reference in references
            ]
        return {"calls": sum(found), "effects": len(found)}


def start(output: IO[bytes] | None = None, port: int = 0) -> tuple[subprocess.Popen[bytes], str]:
    """Start a ledger; its process, and its URL, which can be called at once.

    It ends when its standard input does: with the last process that holds the other end.

    Args:
        output: where it writes what goes wrong; this process's own standard error by default.
        port: where it listens; 0: at a free port.
    """
    with socket.create_server((HOST, port), backlog=BACKLOG) as listener:
        descriptor = str(listener.fileno())
        process = subprocess.Popen(  # noqa: S603  # nothing in it comes from outside
            [sys.executable, "-m", "testproject.ledger", descriptor],
            cwd=Path(__file__).parents[1],
            pass_fds=[listener.fileno()],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,  # a Ctrl-C is meant for others
        )
        return process, f"http://{HOST}:{listener.getsockname()[1]}"


@contextmanager
def running(log: Path, port: int = 0) -> Iterator[str]:
    """A ledger for the length of the block; yields its URL.

    Args:
        log: the file for what goes wrong.
        port: as for :func:`start`.
    """
    with log.open("wb") as output:
        process, url = start(output, port)
    try:
        yield url
    finally:
        end(process)


def end(process: subprocess.Popen[Any]) -> None:
    """End a process: by the end of its standard input if that is a pipe, else by SIGTERM."""
    if process.stdin is None:
        process.terminate()
    else:
        process.stdin.close()
    try:
        process.wait(STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the base's name
        """Say nothing of requests."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, listener: socket.socket) -> None:
        super().__init__(listener.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.server_name, self.server_port = listener.getsockname()
        self.setup_environ()
        self.set_app(Ledger())


def main(descriptor: str = "") -> None:
    """Serve until the end of standard input, where a listening socket was handed over.

    Without one, serve at ``LEDGER_PORT`` until Ctrl-C.
    """
    if descriptor:
        server = _Server(socket.socket(fileno=int(descriptor)))
        Thread(target=server.serve_forever, daemon=True).start()
        sys.stdin.read()
        return
    port = int(os.environ.get("LEDGER_PORT", "8001"))
    server = _Server(socket.create_server((HOST, port), backlog=BACKLOG))
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()


if __name__ == "__main__":
    main(*sys.argv[1:])
