"""The app ``idempotency_django.contrib.messaging`` in a project that is not ready for it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.conf import settings
from django.core.management import call_command
from django.db import DatabaseError, connections
from django.test import override_settings

from idempotency_django.contrib.messaging.models import OutboxMessage
from tests.support.outside import ROOT

ALONE = """
SECRET_KEY = "x"
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
INSTALLED_APPS = ["idempotency_django.contrib.messaging"]
"""


def test_alone(tmp_path: Path) -> None:
    """Without the app ``idempotency_django``, the error says which app is missing."""
    (tmp_path / "alone.py").write_text(ALONE)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    variables = {**os.environ, "DJANGO_SETTINGS_MODULE": "alone", "PYTHONPATH": path}
    command = [sys.executable, "-m", "django", "check"]
    ended = subprocess.run(
        command, check=False, env=variables, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 1
    assert 'Add "idempotency_django" to INSTALLED_APPS and run' in ended.stderr


@pytest.fixture(params=list(settings.DATABASES))
def unmigrated(request: pytest.FixtureRequest, transactional_db: None) -> Iterator[str]:
    """The alias of each database, in which the outbox has no table."""
    table = OutboxMessage._meta.db_table
    with connections[request.param].cursor() as cursor:
        cursor.execute(f"ALTER TABLE {table} RENAME TO {table}_away")
    with override_settings(IDEMPOTENCY={"MESSAGING_DATABASE": request.param}):
        yield request.param
    with connections[request.param].cursor() as cursor:
        cursor.execute(f"ALTER TABLE {table}_away RENAME TO {table}")


every_database = pytest.mark.django_db(transaction=True, databases="__all__")


@every_database
@pytest.mark.parametrize("options", [[], ["--once"]])
def test_migrate_forgotten(unmigrated: str, options: list[str]) -> None:
    """A command that needs a missing table ends with the database's error, and does not retry."""
    if not options and connections[unmigrated].vendor == "sqlite":
        pytest.skip("SQLite has no error of its own for a missing table")
    with pytest.raises(DatabaseError, match="outboxmessage"):
        call_command("run_messaging", *options)
