"""The Celery task, called and sent by beat."""

from __future__ import annotations

import pytest

from idempotency_django.models import IdempotencyKey
from idempotency_django.tasks import purge_expired_keys
from tests.support.factories import records

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
