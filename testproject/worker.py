"""``python -m testproject.worker``: a Celery worker that ends when its standard input does.

So it ends with the last process that holds the other end: the server that started it, and that
server's own processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from celery.bin.celery import celery

PROCESSES = 8


def start() -> subprocess.Popen[bytes]:
    """Start a worker for the broker that the environment names."""
    return subprocess.Popen(
        [sys.executable, "-m", "testproject.worker"],
        cwd=Path(__file__).parents[1],
        stdin=subprocess.PIPE,
        start_new_session=True,  # a Ctrl-C is meant for others
    )


def _end_with_input() -> None:
    sys.stdin.buffer.raw.read()  # type: ignore[attr-defined]
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Work."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "testproject.settings")
    threading.Thread(target=_end_with_input, daemon=True).start()
    options = ["--concurrency", str(PROCESSES), "-O", "fair", "--loglevel", "WARNING"]
    options += ["--without-gossip", "--without-mingle"]
    celery.main(["-A", "testproject.celery", "worker", *options], prog_name="celery")


if __name__ == "__main__":
    main()
