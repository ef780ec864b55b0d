"""The tasks of the tests, and one of celery-once if that is installed."""

from __future__ import annotations

import time
from importlib.util import find_spec

from tests.contrib.jobs.app import JOBS, app, effect

__all__ = ["app"]

if find_spec("celery_once"):
    from celery_once import QueueOnce

    app.conf.ONCE = {
        "backend": "celery_once.backends.Redis",
        "settings": {"url": JOBS["broker"], "default_timeout": 3600},
    }

    @app.task(base=QueueOnce, name="tests.contrib.jobs.app.once")
    def once(reference: str, seconds: float) -> int:
        """A task whose message can be sent once at a time."""
        done = effect(reference)
        time.sleep(seconds)
        return done
