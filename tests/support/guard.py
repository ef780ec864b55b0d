"""The process that stops a server and removes its folder: ``python -I -S guard.py FOLDER``.

It does so when its standard input ends: when the caller says so, or when the system closes the pipe
because the caller was killed. The first line of its input is the order, as JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

STOP_TIMEOUT = 20  # seconds; then the server is killed


@dataclass(frozen=True)
class Order:
    """For the guard: run ``setup``, then ``serve`` until told to end; then send it ``stop``."""

    setup: list[list[str]]
    serve: list[str]
    stop: int
    account: dict[str, Any]


def _be_guard(folder: str) -> None:
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, lambda *_: None)  # not SIG_IGN, which the server would inherit
    try:
        if order := sys.stdin.readline():
            _obey(Order(**json.loads(order)), folder)
    finally:
        shutil.rmtree(folder)


def _obey(order: Order, folder: str) -> None:
    # One locale, so that servers and their logs do not depend on the caller's.
    run: dict[str, Any] = {"env": os.environ | {"LC_ALL": "C"}, "cwd": folder, **order.account}
    run |= {"stdin": subprocess.DEVNULL, "stdout": sys.stderr}  # which is the log
    try:
        for command in order.setup:
            subprocess.run(command, check=True, **run)
        server = subprocess.Popen(order.serve, **run)
    except (OSError, subprocess.SubprocessError) as error:
        print(error, file=sys.stderr, flush=True)
        os.close(1)
        sys.stdin.read()
        return
    threading.Thread(target=server.wait, daemon=True).start()  # or it would end as a zombie
    with suppress(BrokenPipeError):
        os.write(1, b"%d\n" % server.pid)
    sys.stdin.read()
    server.send_signal(order.stop)
    try:
        server.wait(STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


if __name__ == "__main__":
    _be_guard(sys.argv[1])
