"""How slow this machine is at the moment: what a test waits for takes so much longer."""

from __future__ import annotations

import os

MOST = 10.0


def slowness() -> float:
    """How many processes want each core; 1 if none has to wait. ``TEST_SLOWNESS`` may say more."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    waiting = os.getloadavg()[0] / (cores or 1)
    return min(MOST, max(1.0, waiting, float(os.environ.get("TEST_SLOWNESS", "1"))))


def patience(seconds: float) -> float:
    """The seconds to wait for what takes less than these on an idle machine, even a slow one."""
    return seconds * slowness()
