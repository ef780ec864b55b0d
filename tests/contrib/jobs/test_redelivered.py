"""A broker delivers the message of a task again while the task is running."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from celery import chord

from tests.contrib.jobs.workers import Jobs, until
from tests.e2e.databases import Database
from tests.faults.wires import wire_to
from tests.support.servers import Server

pytestmark = pytest.mark.e2e

SECONDS = 8.0
VISIBILITY = 2.0
"""The task takes as long as four deliveries."""

LEASE = 1.0
"""A message that was sent again waits for a lease at most, so Redis does not repeat it."""

PROTECTED = ("leased", "transactional")


@pytest.fixture
def jobs(database: Database, redis_server: Server, log: Path) -> Jobs:
    jobs = Jobs(database, redis_server.url, redis_server.url, log, LEASE, VISIBILITY)
    jobs.migrate()
    return jobs


@pytest.mark.nightly
def test_on_redis(jobs: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    """A task that takes longer than Redis waits for its acknowledgement is delivered again and
    again. Celery executes each delivery, even where it looks for results; a protected task has one
    effect, each delivery the same result, and its chord one body.
    """
    other = jobs.broker.replace("/0", "/1")
    deduplicated = replace(jobs, broker=other, results_url=other, deduplicate=True)
    with jobs.worker(), deduplicated.worker():
        deduplicated.task("plain", "deduplicated", SECONDS).apply_async()
        jobs.task("plain", "plain", SECONDS).apply_async()
        sent = {kind: _in_chord(jobs, kind) for kind in PROTECTED}
        results = {kind: jobs.results(ids) for kind, ids in sent.items()}
        jobs.wait_until_idle()
        deduplicated.wait_until_idle()

    effects = {kind: jobs.effects(kind) for kind in ("plain", "deduplicated", *PROTECTED)}
    deliveries = {kind: jobs.deliveries()[sent[kind][0]] for kind in PROTECTED}
    with capsys.disabled():
        print(f"\neffects: {effects}, deliveries: {deliveries}")
    assert effects["plain"]["job"] > 1
    assert effects["deduplicated"]["job"] > 1
    for kind in PROTECTED:
        assert effects[kind] == Counter(job=1, body=1)
        done, collected = results[kind]
        assert collected == [done]
        # Each delivery by Redis sends one message after the other, a lease apart.
        assert 1 < deliveries[kind] <= 2 + (SECONDS / VISIBILITY) * (SECONDS / LEASE)


@pytest.mark.nightly
def test_on_rabbitmq(rabbit: Server, database: Database, redis_server: Server, log: Path) -> None:
    """A worker that loses its connection goes on with its tasks, which RabbitMQ delivers again at
    once. Celery executes them again, even where it looks for results; a protected task has one
    effect.
    """
    jobs = Jobs(database, rabbit.url, redis_server.url, log, deduplicate=True)
    jobs.migrate()
    kinds = ("plain", *PROTECTED)
    with wire_to(rabbit.url) as wire, replace(jobs, broker=wire.url).worker():
        sent = {kind: jobs.task(kind, kind, SECONDS).apply_async().id for kind in kinds}
        until(lambda: len(jobs.deliveries()) == len(kinds) and jobs.effects("leased"))
        wire.cut_all()
        until(lambda: min(jobs.deliveries().values()) > 1)
        jobs.results(sent.values())
        jobs.wait_until_idle()

    effects = {kind: jobs.effects(kind) for kind in kinds}
    assert effects == {"plain": {"job": 2}, "leased": {"job": 1}, "transactional": {"job": 1}}
    # One for each time that a lease ends, and none besides.
    assert all(jobs.deliveries()[sent[kind]] <= 2 + 2 * SECONDS for kind in PROTECTED)


def _in_chord(jobs: Jobs, kind: str) -> tuple[str, str]:
    """The ids of a task and of its chord's body."""
    sent = chord([jobs.task(kind, kind, SECONDS)], app=jobs.client)(
        jobs.task("unprotected_body", kind)
    )
    return sent.parent.results[0].id, sent.id
