"""Processes that tests start, when the tests are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.support.machine import MOST, patience
from tests.support.outside import ROOT

RUN = """
import subprocess, time
from tests.support import orphans

with orphans.guarded():
    subprocess.Popen(["sh", "-c", "sleep 600 & echo ready; wait"], start_new_session=True)
    time.sleep(600)
"""


def test_orphans_are_killed() -> None:
    """Children of killed tests, and what these have started, are killed."""
    with subprocess.Popen([sys.executable, "-c", RUN], cwd=ROOT, stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"ready\n"
        os.kill(run.pid, signal.SIGKILL)
        assert run.stdout.read() == b""  # the pipe is closed when the last of them has ended


@pytest.mark.parametrize(("load", "times"), [(0.1, 1.0), (6.0, 3.0), (500.0, MOST)])
def test_patience(monkeypatch: pytest.MonkeyPatch, load: float, times: float) -> None:
    """A wait is longer by as much as the machine is busy, within limits."""
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0, 0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert patience(10) == 10 * times
