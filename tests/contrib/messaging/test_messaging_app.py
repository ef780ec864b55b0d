"""The app ``idempotency_django.contrib.messaging`` in a project that is not ready for it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.core.management import CommandError, call_command
from django.db import DatabaseError, connections
from django.test import override_settings

from idempotency_django.contrib.messaging.models import OutboxMessage
from idempotency_django.contrib.messaging.tables import check_tables, refuse_unmigrated
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
@pytest.mark.parametrize("command", ["relay_outbox", "process_inbox"])
def test_migrate_forgotten(unmigrated: str, command: str) -> None:
    """Commands that need a missing table end, and say which one and what to run."""
    with pytest.raises(CommandError, match=r"outboxmessage\. Run: manage.py migrate"):
        call_command(command, "--once")


@every_database
def test_check(unmigrated: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``check --database`` warns of a missing table; ``migrate``, which makes it, does not."""
    [warning] = check_tables(databases=[unmigrated])
    assert warning.id == "idempotency_django.W028"
    assert f"migrate idempotency_messaging --database {unmigrated}" in str(warning.hint)
    assert check_tables() == []
    monkeypatch.setattr("sys.argv", ["manage.py", "migrate"])
    assert check_tables(databases=[unmigrated]) == []


@every_database
def test_database_away() -> None:
    """A database that is away may come back: a command begins nevertheless."""

    def away(*_: Any) -> Any:
        raise DatabaseError

    with connections["default"].execute_wrapper(away):
        refuse_unmigrated()
    assert check_tables(databases=["default"]) == []


@override_settings(IDEMPOTENCY={"MESSAGING_DATABASE": 7})
def test_misconfigured() -> None:
    """A wrong setting is reported by the check of settings, and by no second one."""
    assert check_tables(databases=["default"]) == []


def test_consumers_without_the_app() -> None:
    """Consumers and brokers are imported without the app's tables."""
    program = (
        "import django\n"
        "from django.conf import settings\n"
        "settings.configure(INSTALLED_APPS=['idempotency_django'])\n"
        "django.setup()\n"
        "from idempotency_django.contrib.messaging.brokers import http, kafka, local\n"
        "from idempotency_django.contrib.messaging.brokers import kombu\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, timeout=60)
