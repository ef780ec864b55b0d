"""The clients need no Django."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
from importlib.abc import MetaPathFinder

class Blocked(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocked())
import idempotency_django.client as client

client.IdempotentClient()
client.AsyncIdempotentClient()
assert client.key_for("order", 17) == client.key_for("order", 17)
for name in {blocked!r}:
    assert name not in sys.modules, name
"""

BLOCKED = ["django", "rest_framework", "asgiref", "http_sf"]


def test_alone() -> None:
    """They are imported, and a client is made, where nothing else is installed."""
    program = PROGRAM.replace("{blocked!r}", repr(BLOCKED))
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=60)
