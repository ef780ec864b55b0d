"""``python -m benchmarks.jobs``: the effects of a task that is delivered again while it runs.

A task of eight seconds on Valkey, which delivers it again after two. celery-once takes part if it
is installed; it belongs to no dependency group.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from tests.contrib.jobs.workers import Jobs
from tests.e2e import databases
from tests.support.servers import postgres, valkey

SECONDS = 8.0
VISIBILITY = 2.0

WAYS = {
    "Celery alone": "plain",
    "Celery with `worker_deduplicate_successful_tasks`": "plain",
    "celery-once": "once",
    "`IdempotentTask`, transactional": "transactional",
    "`IdempotentTask`, leased": "leased",
}


def main() -> None:
    """Print the table."""
    with ExitStack() as stack:
        os.environ["TEST_POSTGRES_URL"] = stack.enter_context(postgres(durable=False)).url
        database = stack.enter_context(databases.postgres())
        redis = stack.enter_context(valkey()).url
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        alone = Jobs(
            database, redis, redis, folder / "log", visibility=VISIBILITY, app="benchmarks.jobs_app"
        )
        other = redis.replace("/0", "/1")
        dedup = replace(alone, broker=other, results_url=other, deduplicate=True)
        alone.migrate()
        served = {way: dedup if "deduplicate" in way else alone for way in WAYS}
        if find_spec("celery_once") is None:
            del served["celery-once"]
        with alone.worker(processes=16), dedup.worker():
            for way, jobs in served.items():
                jobs.task(WAYS[way], way, SECONDS).apply_async()
            for jobs in (alone, dedup):
                jobs.wait_until_idle()
        print("| | Effects |\n| --- | --- |")
        for way in served:
            print(f"| {way} | {alone.effects(way)['job']} |")


if __name__ == "__main__":
    main()
