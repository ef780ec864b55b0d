"""Workers are killed between any two statements of a task."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.contrib.jobs.workers import Jobs, until
from tests.e2e.databases import Database
from tests.support.nightly import few, sizes
from tests.support.servers import Server

pytestmark = pytest.mark.e2e

KINDS = ("leased", "transactional")
SILENCE = 20.0
"""Seconds without a word of the worker after which it has nothing left to do: leases take one."""


@pytest.fixture(params=few(["redis", "rabbitmq"]))
def jobs(
    request: pytest.FixtureRequest, database: Database, redis_server: Server, log: Path
) -> Jobs:
    broker = redis_server if request.param == "redis" else request.getfixturevalue("rabbit")
    jobs = Jobs(database, broker.url, redis_server.url, log)
    jobs.migrate()
    return jobs


@pytest.mark.parametrize("stride", sizes(3, 1))
def test_at_every_boundary(
    jobs: Jobs, stride: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever the process of a task is killed, no task is lost: it has one effect, and its
    callback is executed once.

    Celery may forget the message of a process that dies while it is given the task. The broker
    delivers it again once the worker has ended.
    """
    with jobs.worker():
        strikes = [
            (kind, number)
            for kind in KINDS
            for number in range(0, len(_boundaries(jobs, kind, tmp_path / kind)), stride)
        ]
        parts = [
            jobs.task(
                kind,
                f"{kind}-{number}",
                headers={"strike": number},
                link=jobs.task("body", f"{kind}-{number}"),
            )
            for kind, number in strikes
        ]
        ids = [part.apply_async().id for part in parts]
        until(lambda: jobs.are_ready(ids) or jobs.seconds_of_silence() > SILENCE)
        if jobs.are_ready(ids):
            jobs.wait_until_idle()
    if not jobs.are_ready(ids):
        with jobs.worker():
            jobs.results(ids)
            jobs.wait_until_idle()

    killed = len(re.findall(r"exited with 'signal 9 \(SIGKILL\)'", jobs.log.read_text()))
    assert killed > 0.9 * len(strikes)  # a message may have been given to a process that was dying
    effects = {f"{kind}-{number}": jobs.effects(f"{kind}-{number}") for kind, number in strikes}
    assert all(done == Counter(job=1, body=1) for done in effects.values()), effects
    with capsys.disabled():
        print(f"\nkilled at {len(strikes)} points")


@pytest.mark.nightly
def test_whole_worker(jobs: Jobs, tmp_path: Path) -> None:
    """A worker that is killed with all of its processes leaves its tasks to the next one."""
    with jobs.worker():
        passed = _boundaries(jobs, "leased", tmp_path / "leased")
    strikes = [len(passed) // 2, len(passed) - 1]
    parts = [
        jobs.task("leased", f"part-{number}", headers={"strike": number, "whole": True})
        for number in strikes
    ]
    ids = [part.apply_async().id for part in [*parts, jobs.task("leased", "part")]]
    killed = 0
    while not jobs.are_ready(ids):
        assert killed <= len(strikes)
        with jobs.worker() as worker:
            until(lambda worker=worker: jobs.are_ready(ids) or worker.poll() is not None)
            killed += worker.poll() is not None
            if jobs.are_ready(ids):
                jobs.wait_until_idle()
    assert killed > 0
    references = ["part", *(f"part-{number}" for number in strikes)]
    assert [jobs.effects(reference) for reference in references] == [Counter(job=1)] * 3


def _boundaries(jobs: Jobs, kind: str, report: Path) -> list[str]:
    """What a task passes that nobody disturbs, until Celery has stored its result."""
    link = jobs.task("body", f"{kind}-undisturbed")
    jobs.task(kind, f"{kind}-undisturbed", headers={"report": str(report)}, link=link).apply_async()
    until(report.exists)
    passed: list[str] = json.loads(report.read_text())
    assert passed[-1] == "after SEND"
    return passed
