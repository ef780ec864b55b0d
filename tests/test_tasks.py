"""The Celery task, called and sent by beat."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from idempotency_django.models import IdempotencyKey
from idempotency_django.tasks import purge_expired_keys
from idempotency_django.testing import eventually
from tests.support.factories import records
from tests.support.outside import environment, running
from tests.support.servers import valkey

pytestmark = pytest.mark.django_db(transaction=True)


def test_purges_and_counts() -> None:
    """The task purges every store in batches, and returns how many records went."""
    records(5, purgeable=True)
    records(2)
    assert purge_expired_keys(batch_size=2) == 5
    assert IdempotencyKey.objects.count() == 2


def test_name() -> None:
    """The task has the name that schedules know it by, wherever it is imported from."""
    assert purge_expired_keys.name == "idempotency_django.tasks.purge_expired_keys"


@pytest.fixture
def celery(tmp_path: Path) -> Iterator[Path]:
    """A worker and beat with a broker, each a process of its own; yields the worker's log."""
    log = tmp_path / "worker"
    with ExitStack() as stack:
        broker = stack.enter_context(valkey())
        options = {
            "env": environment() | {"TEST_BROKER": broker.url},
            "stdout": stack.enter_context(log.open("w")),
            "stderr": subprocess.STDOUT,
        }
        app = ("-m", "celery", "-A", "tests.support.celery_app")
        stack.enter_context(
            running(*app, "worker", "-l", "info", "-c", "1", "--without-mingle", **options)
        )
        stack.enter_context(
            running(*app, "beat", "-s", f"{tmp_path}/schedule", "--pidfile", "", **options)
        )
        yield log


@pytest.mark.e2e
@pytest.mark.nightly
def test_sent_by_beat(celery: Path) -> None:
    """Beat sends the documented entry and a worker purges, again and again."""
    for _ in range(2):
        records(25, purgeable=True)
        live = records(1)[0]
        try:
            eventually(lambda: IdempotencyKey.objects.purgeable().count() == 0)
        except AssertionError:
            pytest.fail(celery.read_text())
        assert IdempotencyKey.objects.filter(pk=live.pk).exists()
