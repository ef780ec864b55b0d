"""``python -m testproject.server`` migrates, seeds and serves.

``PORT`` (8000), ``WORKERS`` (2) and ``ASGI`` (``1``: uvicorn's workers instead of gunicorn's
threads) come from the environment, and what ``settings.py`` lists. Where ``LEDGER_URL`` is not
among it, a ledger is started for as long as this serves; where ``BROKER_URL`` is, a Celery worker.
``background.py`` runs for as long in any case.

:func:`running` does the same in a process of its own, for the demo and the tests.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import django
import httpx
from django.core.management import call_command

from testproject import background, ledger, worker

ROOT = Path(__file__).parents[1]
BACKLOG = 1024
START_TIMEOUT = 300  # seconds, for a busy machine; one that dies is not waited for


def main() -> None:
    """Prepare the database and become gunicorn."""
    os.environ["DJANGO_SETTINGS_MODULE"] = "testproject.settings"
    if not os.environ.get("LEDGER_URL"):
        _start_ledger()
    django.setup()
    call_command("migrate", verbosity=0)
    call_command("seed")
    _outlived_by_none(background.start())
    if os.environ.get("BROKER_URL"):
        _outlived_by_none(worker.start())
    command = [sys.executable, "-m", "gunicorn", "--config", "python:testproject.gunicorn_config"]
    os.execv(sys.executable, command)  # noqa: S606  # nothing in it comes from outside


def _start_ledger() -> None:
    """Start a ledger that ends when this process, gunicorn by then, has ended with its workers."""
    process, url = ledger.start()
    _outlived_by_none(process)
    os.environ["LEDGER_URL"] = url
    print(f"Ledger: {url} (look at {url}/calls?reference=…).", flush=True)


def _outlived_by_none(process: subprocess.Popen[bytes]) -> None:
    """Let a process end that reads its standard input when this one and its children have ended."""
    assert process.stdin is not None  # noqa: S101  # it is a pipe
    os.set_inheritable(process.stdin.fileno(), True)


@contextmanager
def running(log: Path, **environment: str) -> Iterator[str]:
    """Serve on a free port for the length of the block; yields the URL when it responds.

    Args:
        log: the file for what the server says.
        environment: variables for it, on top of this process's own.

    Raises:
        RuntimeError: it did not start; with the end of its log.
    """
    with (
        log.open("wb") as output,
        socket.create_server(("127.0.0.1", 0), backlog=BACKLOG) as listener,
    ):
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        handed_over = listener.fileno()
        process = subprocess.Popen(
            [sys.executable, "-m", "testproject.server"],
            cwd=ROOT,
            env={**os.environ, **environment, "BIND": f"fd://{handed_over}"},
            pass_fds=[handed_over],
            stdout=output,
            stderr=output,
        )
    # The server alone holds the socket now: if it dies, a client is refused and need not wait.
    try:
        _wait_until_it_responds(url, log)
        yield url
    finally:
        ledger.end(process)


def _wait_until_it_responds(url: str, log: Path) -> None:
    try:
        httpx.get(f"{url}/healthz", timeout=START_TIMEOUT).raise_for_status()
    except httpx.HTTPError as error:
        end = log.read_text(errors="replace")[-4000:]
        raise RuntimeError(f"The server did not start: {error}. Its log ends:\n{end}") from error


if __name__ == "__main__":
    main()
