"""What is imported only when it is needed, and what is missing then."""

from __future__ import annotations

import subprocess
import sys

import pytest

MISSING = """
import sys
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
"""
"""The beginning of a program for which these packages are not installed."""

IMPORT = """
try:
    from {module} import {name}
except ImportError as error:
    assert isinstance(error, ModuleNotFoundError)
    print(error)
"""

CLIENT = """
import idempotency_django.client as client

client.IdempotentClient()
client.AsyncIdempotentClient()
assert client.key_for("order", 17) == client.key_for("order", 17)
assert not [name for name in {packages!r} if name in sys.modules]
"""


def run(program: str) -> str:
    """What a program prints, in a process of its own."""
    command = [sys.executable, "-W", "error", "-c", program]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


@pytest.mark.parametrize(
    ("package", "module", "name", "extra"),
    [
        ("httpx", "idempotency_django.client", "IdempotentClient", "client"),
        ("anyio", "idempotency_django.client", "AsyncIdempotentClient", "client"),
        ("celery", "idempotency_django.contrib.celery", "IdempotentTask", "celery"),
        ("redis", "idempotency_django.contrib.redis", "RedisStore", "redis"),
        ("django_redis", "idempotency_django.contrib.redis", "RedisStore", "redis"),
        ("rest_framework", "idempotency_django.drf", "IdempotentViewMixin", "drf"),
        ("rest_framework", "idempotency_django.testing", "IdempotentAPIClient", "drf"),
        (
            "rest_framework",
            "idempotency_django.contrib.concurrency",
            "PreconditionMixin",
            "drf",
        ),
    ],
)
def test_missing_extra(package: str, module: str, name: str, extra: str) -> None:
    """An import for which an extra is missing says how to install it."""
    said = run(MISSING.format(packages=[package]) + IMPORT.format(module=module, name=name))
    assert f'pip install "idempotency-django[{extra}]"' in said
    assert package in said


def test_client_alone() -> None:
    """The clients are imported and made where there is no Django."""
    packages = ["django", "rest_framework", "asgiref", "http_sf"]
    run(MISSING.format(packages=packages) + CLIENT.format(packages=packages))
