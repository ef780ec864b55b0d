"""A project's Celery app: tasks whose effects are counted, and workers that are killed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.contrib.jobs.settings")
django.setup()

from celery import Celery, signals  # noqa: E402
from django.conf import settings  # noqa: E402

from idempotency_django.contrib.celery import IdempotentTask  # noqa: E402
from idempotency_django.policy import Policy  # noqa: E402
from tests.faults.bank.models import Effect  # noqa: E402
from tests.faults.boundaries import Strike, boundaries  # noqa: E402
from tests.faults.numbering import number_statements  # noqa: E402

number_statements()
JOBS = settings.JOBS
LEASED = Policy(mode="leased")

app = Celery("jobs", broker=JOBS["broker"], backend=JOBS["results_url"])
app.conf.update(
    broker_connection_retry_on_startup=True,
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_default_queue=JOBS["queue"],
    worker_deduplicate_successful_tasks=JOBS["deduplicate"],
    worker_proc_alive_timeout=60,
    worker_lost_wait=0.05,  # seconds for the result of a process that was killed; by default 10
    worker_prefetch_multiplier=1,
)
if JOBS["broker"].startswith("redis"):
    app.conf.broker_transport_options = {
        "visibility_timeout": JOBS["visibility"],
        "unacked_restore_interval": 1,  # look each time …
        "unacked_restore_throttle": 1,  # … and seconds between two looks
    }


def effect(reference: str, kind: str = "job") -> int:
    """What is counted."""
    return int(Effect.objects.create(reference=reference, kind=kind).pk)


class Struck(IdempotentTask):
    """A task whose process is killed at a boundary of its first delivery.

    The header ``strike`` is the number of the boundary, and ``whole`` kills the worker with it; the
    header ``report`` is a file for the boundaries that were passed.
    """

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        boundaries.passed.clear()
        again = (self.request.delivery_info or {}).get("redelivered")
        number = self.request.get("strike")
        copy = self.request.get("idempotency_again")
        boundaries.strike = None
        if number is not None and not again and not copy:
            boundaries.strike = Strike(number, whole=bool(self.request.get("whole")))
        return super().__call__(*args, **kwargs)


@signals.before_task_publish.connect
def _before(**_: Any) -> None:
    boundaries.pass_("before SEND")


@signals.after_task_publish.connect
def _after(**_: Any) -> None:
    boundaries.pass_("after SEND")


@signals.task_postrun.connect
def _report(task: Any = None, **_: Any) -> None:
    if report := task.request.get("report"):
        written = Path(f"{report}.part")
        written.write_text(json.dumps(boundaries.passed["main"]))
        written.replace(report)  # whoever waits for the file reads all of it
    boundaries.strike = None


@app.task
def plain(reference: str, seconds: float) -> int:
    done = effect(reference)
    time.sleep(seconds)
    return done


@app.task(base=Struck, bind=True, idempotency_policy=LEASED)
def leased(self: IdempotentTask, reference: str, seconds: float = 0) -> int:
    """The effect is a step: it is stored together with its result."""
    done: int = self.execution.step("effect", effect, reference)
    time.sleep(seconds)
    return done


@app.task(base=Struck)
def transactional(reference: str, seconds: float = 0) -> int:
    """The effect is committed together with the result of the task."""
    done = effect(reference)
    time.sleep(seconds)
    return done


@app.task
def unprotected_body(results: list[int], reference: str) -> list[int]:
    """The body of a chord, as Celery sends it."""
    effect(reference, "body")
    return results


@app.task(base=IdempotentTask)
def body(results: list[int], reference: str) -> list[int]:
    """A callback that is protected too."""
    effect(reference, "body")
    return results
