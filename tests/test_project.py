"""Django's own commands find nothing to do or to complain about in a project."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from django.core.management import call_command

ROOT = Path(__file__).parents[1]


@pytest.mark.django_db(databases="__all__")
def test_no_migration_is_missing() -> None:
    """The migrations make the model as it is."""
    call_command("makemigrations", "idempotency_django", check=True, dry_run=True, verbosity=0)


def test_project_passes_the_checks() -> None:
    """``manage.py check`` finds nothing in a project that is set up as the docs say."""
    done = subprocess.run(
        [sys.executable, "-m", "django", "check", "--fail-level", "DEBUG"],
        env=os.environ | {"DJANGO_SETTINGS_MODULE": "tests.settings", "TEST_DATABASES": "sqlite"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "no issues" in done.stdout
