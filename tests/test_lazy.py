"""What is imported only when it is needed, and what is missing then."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
try:
    from {module} import {name}
except ImportError as error:
    assert isinstance(error, ModuleNotFoundError)
    print(error)
"""


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
    program = PROGRAM.format(package=package, module=module, name=name)
    said = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    assert f'pip install "idempotency-django[{extra}]"' in said
    assert package in said
