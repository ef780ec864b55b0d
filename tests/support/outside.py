"""Processes that a test starts, which work on its database."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from django.db import connections

from testproject.ledger import end

ROOT = Path(__file__).parents[2]
_CONNECTION = ("ENGINE", "NAME", "USER", "PASSWORD", "HOST", "PORT", "OPTIONS")


def environment(alias: str = "default", **variables: str) -> dict[str, str]:
    """What a process needs to know to find one of the test databases, and more variables for it."""
    given = connections[alias].settings_dict
    return {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests.support.outside_settings",
        "TEST_DATABASE": json.dumps({name: given[name] for name in _CONNECTION}),
        **variables,
    }


@contextmanager
def running(*command: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a Python program; it is ended afterwards, if it has not by itself."""
    with subprocess.Popen([sys.executable, *command], cwd=ROOT, text=True, **options) as process:
        try:
            yield process
        finally:
            end(process)
