"""A server like gunicorn's: a parent that listens, and workers that it forks and forks again.

``python -m tests.faults.nemesis_worker WORKERS`` makes the tables and prints its port. Each line
of its standard input is a fault, see :meth:`Workers.obey`. It ends with its input, and all workers
with it.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import sys
import time

import django
from django.core.handlers.wsgi import WSGIHandler
from django.core.management import call_command
from django.core.servers.basehttp import ThreadedWSGIServer, WSGIRequestHandler
from django.db import connections
from django.urls import get_resolver

PR_SET_PDEATHSIG = 1
LOOK = 0.02  # seconds between two looks at who is dead


def serve(listener: socket.socket, handler: WSGIHandler) -> None:
    """Serve whatever comes, each connection in a thread of its own."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    host, port = listener.getsockname()
    server = ThreadedWSGIServer((host, port), WSGIRequestHandler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    server.server_name, server.server_port = host, port
    server.setup_environ()
    server.set_app(handler)
    server.serve_forever(poll_interval=0.5)


class Workers:
    """The processes that serve, each of which is replaced when it dies.

    Only their parent sends them signals: it alone knows whose number is whose.
    """

    def __init__(self, count: int, listener: socket.socket) -> None:
        self._count, self._listener = count, listener
        self._handler = WSGIHandler()
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
                serve(self._listener, self._handler)
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


def main() -> None:
    django.setup()
    call_command("migrate", run_syncdb=True, verbosity=0)
    connections.close_all()
    get_resolver().url_patterns  # noqa: B018  # imports the views, once for all workers
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    listener.setblocking(False)  # several wait for each connection, and one gets it
    workers = Workers(int(sys.argv[1]), listener)
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


if __name__ == "__main__":
    main()
