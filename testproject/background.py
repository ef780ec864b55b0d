"""``python -m testproject.background``: what the reference app does outside of requests.

Each of ``JOBS`` runs in a thread of its own, and begins again if it fails. The process ends with
its standard input, so with the last process that holds the other end: the server that started it.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import django

POLL = 0.2  # seconds; short, for trying it out
PAUSE = 1  # seconds before a job that has failed begins again
STOP_TIMEOUT = 10  # seconds for the jobs to finish what they have in hand

Job = Callable[[threading.Event], object]
"""Works until the event is set."""


def relay_outbox(stop: threading.Event) -> None:
    """Send what the requests publish, and have its consumers handle it."""
    from idempotency_django.contrib.messaging import Relay  # noqa: PLC0415  # needs models

    relay = Relay()
    while not stop.wait(POLL):
        relay.drain(stop)


def process_inbox(stop: threading.Event) -> None:
    """Handle the webhooks that were received."""
    from idempotency_django.contrib.messaging import process_due  # noqa: PLC0415  # needs models

    while not stop.wait(POLL):
        process_due(stop=stop)


JOBS: tuple[Job, ...] = (relay_outbox, process_inbox)

logger = logging.getLogger(__name__)


def start() -> subprocess.Popen[bytes]:
    """Start it, for the database that the environment names."""
    return subprocess.Popen(
        [sys.executable, "-m", "testproject.background"],
        cwd=Path(__file__).parents[1],
        stdin=subprocess.PIPE,
        start_new_session=True,  # a Ctrl-C is meant for others
    )


def main() -> None:
    """Do all jobs until the standard input ends."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "testproject.settings")
    django.setup()
    stop = threading.Event()
    threads = [threading.Thread(target=_keep_up, args=(job, stop), daemon=True) for job in JOBS]
    for thread in threads:
        thread.start()
    sys.stdin.buffer.raw.read()  # type: ignore[attr-defined]
    stop.set()
    for thread in threads:
        thread.join(STOP_TIMEOUT)


def _keep_up(job: Job, stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            job(stop)
        except Exception:
            logger.exception("A job in the background has failed, and begins again.")
            stop.wait(PAUSE)


if __name__ == "__main__":
    main()
