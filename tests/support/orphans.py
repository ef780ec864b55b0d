"""No process outlives the tests that have started it, even if they are killed.

The processes of a run inherit a variable whose value is the run's alone. A guard, in a session of
its own, waits for the end of the run, which closes the pipe to it. Then it kills each process that
has the variable. Servers are left to the guards of their own, which also remove their folders.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

VARIABLE = "TEST_RUN"


@contextmanager
def guarded() -> Iterator[None]:
    """What is started within this block, and later by what was started, ends with this process."""
    os.environ[VARIABLE] = secrets.token_hex(16)
    command = [sys.executable, "-I", "-S", __file__, os.environ[VARIABLE]]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, env=unguarded(), start_new_session=True
    ):  # which closes the pipe at the end
        yield
        del os.environ[VARIABLE]


def unguarded() -> dict[str, str]:
    """The environment of a process that has to end by itself."""
    return {name: value for name, value in os.environ.items() if name != VARIABLE}


def _of_the_run(token: str) -> list[int]:
    """Its processes, where the system tells the environment of a process."""
    sought, found = f"{VARIABLE}={token}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is somebody else's
            if sought in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def _be_guard(token: str) -> None:
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, lambda *_: None)
    sys.stdin.read()
    while orphans := _of_the_run(token):  # again, because one may have started another
        for pid in orphans:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


if __name__ == "__main__":
    _be_guard(sys.argv[1])
