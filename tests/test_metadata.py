"""What the built distributions say and hold, as far as ``pyproject.toml`` decides it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def declared() -> Any:
    """The content of ``pyproject.toml``."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_urls(declared: Any) -> None:
    """The package's page in an index leads to the documentation and to the changelog."""
    urls = declared["project"]["urls"]
    assert set(urls) >= {"Documentation", "Changelog"}
    assert all(url.startswith("https://") for url in urls.values())


def test_source_distribution(declared: Any) -> None:
    """It holds what its documentation includes and what a contributor starts from."""
    included = declared["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert {"CONTRIBUTING.md", "CHANGELOG.md", "Makefile", "docs", "tests"} <= set(included)
    assert all((ROOT / name).exists() for name in included)
