"""The clients need no Django, and the keys no httpx."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from importlib.abc import MetaPathFinder

class Blocked(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocked())
import idempotency_django.client as client
from idempotency_django.client import *PARTS*

assert client.key_for("order", 17) == client.key_for("order", 17)
for name in {blocked!r}:
    assert name not in sys.modules, name
"""

BLOCKED = ["django", "rest_framework", "asgiref", "http_sf"]


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        ("key_for, is_retryable, RetryBudget, OutcomeUnknown", ["httpx"]),
        ("IdempotentClient, AsyncIdempotentClient", []),
    ],
)
def test_alone(names: str, missing: list[str]) -> None:
    """They are imported, and a client is made, where nothing else is installed."""
    program = PROGRAM.replace("*PARTS*", names).replace("{blocked!r}", repr([*BLOCKED, *missing]))
    for name in names.split(", "):
        if name in ("IdempotentClient", "RetryBudget"):
            program += f"{name}()\n"
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=60)
