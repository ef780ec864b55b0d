"""The public names of the core: what the ring and projects import, each from its package.

``public_names.txt`` lists them, a package to a line. When a change of it is wanted::

    python -m tests.test_public_names > tests/public_names.txt
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

PINNED = Path(__file__).with_name("public_names.txt")
PACKAGES = [
    "idempotency_django",
    *(
        f"idempotency_django.{name}"
        for name in ("policy", "engine", "stores", "http", "drf", "admin", "checks", "management")
    ),
    *(f"idempotency_django.{name}" for name in ("testing", "client")),
    *(f"idempotency_django.contrib.{name}" for name in ("messaging", "concurrency", "redis")),
]


def public_names() -> Iterator[str]:
    """Each package, and the names that it offers."""
    for package in PACKAGES:
        yield f"{package}: {' '.join(sorted(import_module(package).__all__))}"


def test_public_names() -> None:
    """The packages offer the names that are written down, and each can be imported."""
    assert list(public_names()) == PINNED.read_text().splitlines()
    for package in map(import_module, PACKAGES):
        for name in package.__all__:
            assert getattr(package, name) is not None


if __name__ == "__main__":
    import django

    django.setup()
    print("\n".join(public_names()))
