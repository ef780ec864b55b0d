"""A process of the bank: ``python -m tests.faults.worker migrate|fork|serve|prefork``.

``fork`` executes each order that comes in as a line of JSON in a process of its own, made from this
one, which has everything loaded and nothing opened, as it says first; it says in a line of JSON how
that ended.
``serve`` serves HTTP on a free port, which it prints. ``prefork 3`` makes the tables and serves as
gunicorn does, with a parent that listens and workers that it forks and forks again; each line of
its standard input is a fault, see :meth:`Workers.obey`. All end with their standard input.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import uuid
from functools import cache
from typing import Any

import django
from django.core.handlers.wsgi import WSGIHandler
from django.core.management import call_command
from django.core.servers.basehttp import ThreadedWSGIServer, WSGIRequestHandler
from django.db import connections
from django.test import RequestFactory
from django.urls import get_resolver

from tests.faults.boundaries import Strike, boundaries
from tests.faults.numbering import number_statements

LONGEST = 60  # seconds that an operation may take
LOOK = 0.02  # seconds between two looks at who is dead
PR_SET_PDEATHSIG = 1
_ORDER = {"path": "/drf/", "fails": False, "strike": None}


def execute(order: dict[str, Any]) -> dict[str, Any]:
    """Serve one request, the way a server does."""
    boundaries.strike = Strike(**order["strike"]) if order["strike"] else None
    request = RequestFactory().post(
        order["path"],
        json.dumps({"reference": order["reference"]}),
        content_type="application/json",
        headers={"Idempotency-Key": order["key"], "X-Fail": str(order["fails"])},
    )
    told: list[Any] = []
    response = _handler()(request.environ, lambda *said: told.extend(said))
    body = b"".join(response)
    response.close()
    status, headers = told
    return {
        "status": int(status.split()[0]),
        "headers": dict(headers),
        "body": body.decode(),
        "passed": boundaries.passed,
    }


@cache
def _handler() -> WSGIHandler:
    return WSGIHandler()


def execute_forked(order: dict[str, Any]) -> dict[str, Any]:
    """The same in a new process, with the signal that ended it instead of a response, or none."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        signal.alarm(LONGEST)
        with os.fdopen(writer, "w") as output:
            json.dump(execute(order), output)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as said:
        response = said.read()
    _, ended = os.waitpid(process, 0)
    return {"signal": os.WTERMSIG(ended), **(json.loads(response) if not ended else {})}


def fork() -> None:
    """Execute what comes in."""
    _warm_up()
    gc.freeze()  # so that a new process need not copy what is here
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(execute_forked(json.loads(line))), flush=True)


class Server(ThreadedWSGIServer):
    """A thread for each connection, and room for many that come at once."""

    request_queue_size = 1024


def _warm_up() -> None:
    """Do once what each new process would have to do again: import, compile, remember.

    In the mode that needs no thread, which would be missing in the new processes.
    """
    execute({**_ORDER, "key": str(uuid.uuid4()), "reference": uuid.uuid4().hex})
    connections.close_all()
    boundaries.passed.clear()


def serve() -> None:
    """Serve HTTP."""
    server = Server(("127.0.0.1", 0), WSGIRequestHandler)
    server.set_app(_handler())
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()


class Workers:
    """The processes that serve, each of which is replaced when it dies.

    Only their parent sends them signals: it alone knows whose number is whose.
    """

    def __init__(self, count: int, listener: socket.socket) -> None:
        self._count, self._listener = count, listener
        self._pids: list[int] = []
        self._paused: dict[int, float] = {}  # until when

    def look_after(self) -> None:
        """Wake who has been paused for long enough, and replace who is dead."""
        for pid, until in list(self._paused.items()):
            if time.monotonic() >= until:
                os.kill(pid, signal.SIGCONT)
                del self._paused[pid]
        while self._pids and (dead := os.waitpid(-1, os.WNOHANG)[0]):
            self._pids.remove(dead)
            self._paused.pop(dead, None)
        while len(self._pids) < self._count:
            pid = os.fork()
            if pid == 0:
                _serve_there(self._listener)
            self._pids.append(pid)

    def obey(self, number: int, pause: float | None) -> None:
        """Pause a worker for so many seconds; ``None``: kill it."""
        pid = self._pids[number]
        os.kill(pid, signal.SIGKILL if pause is None else signal.SIGSTOP)
        if pause is not None:
            self._paused[pid] = time.monotonic() + pause

    def end(self) -> None:
        """Kill them all."""
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)


def _serve_there(listener: socket.socket) -> None:
    """Serve whatever comes, each connection in a thread of its own."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    host, port = listener.getsockname()
    server = ThreadedWSGIServer((host, port), WSGIRequestHandler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    server.server_name, server.server_port = host, port
    server.setup_environ()
    server.set_app(_handler())
    server.serve_forever(poll_interval=0.5)


def prefork(count: int) -> None:
    """Serve HTTP with so many workers."""
    call_command("migrate", run_syncdb=True, verbosity=0)
    connections.close_all()
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    listener.setblocking(False)  # several wait for each connection, and one gets it
    workers = Workers(count, listener)
    print(listener.getsockname()[1], flush=True)
    try:
        while True:
            workers.look_after()
            if select.select([sys.stdin], [], [], LOOK)[0]:
                if not (line := sys.stdin.readline()):
                    return
                workers.obey(**json.loads(line))
    finally:
        workers.end()


def main() -> None:
    """Do what the command line says."""
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.faults.bank.settings"
    django.setup()
    if sys.argv[1] != "prefork":
        number_statements()
    get_resolver().url_patterns  # noqa: B018  # so that the views are loaded
    match sys.argv[1]:
        case "migrate":
            call_command("migrate", run_syncdb=True, verbosity=0)
        case "fork":
            fork()
        case "serve":
            serve()
        case "prefork":
            prefork(int(sys.argv[2]))


if __name__ == "__main__":
    main()
