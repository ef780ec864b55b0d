"""The app ``idempotency_django.messaging`` in a project that is not ready for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.outside import ROOT

ALONE = """
SECRET_KEY = "x"
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
INSTALLED_APPS = ["idempotency_django.messaging"]
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
    assert 'needs "idempotency_django" in INSTALLED_APPS as well' in ended.stderr
