"""What the built distributions say and hold, as far as ``pyproject.toml`` decides it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import django
import pytest

from idempotency_django.checks import NEWEST_DJANGO, check_django

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def declared() -> Any:
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


def classified(declared: Any, prefix: str) -> list[str]:
    """The versions that the classifiers name."""
    names = declared["project"]["classifiers"]
    found = [re.fullmatch(rf"{prefix} :: (\d\.\d+)", name) for name in names]
    return [match[1] for match in found if match]


def test_versions_are_tested(declared: Any) -> None:
    """The tests run on each Python and Django that the classifiers name, and on no other."""
    tox = (ROOT / "tox.ini").read_text()
    pythons = classified(declared, "Programming Language :: Python")
    djangos = classified(declared, "Framework :: Django")
    assert re.findall(r"django(\d+): django~=(\S+)\.0$", tox, re.MULTILINE) == [
        (version.replace(".", ""), version) for version in djangos
    ]
    assert {f"3.{minor}" for minor in re.findall(r"\b3(\d\d)\b", tox)} == set(pythons)
    ci = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert set(re.findall(r"^ +(3\.\d+)$", ci, re.MULTILINE)) == set(pythons)


def test_later_django(declared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later Django can be installed; a check, and no requirement, says that it is untested."""
    [requirement] = [
        each for each in declared["project"]["dependencies"] if each.startswith("django")
    ]
    assert re.fullmatch(r"django>=[\d.]+", requirement)
    newest = "{}.{}".format(*NEWEST_DJANGO)
    assert newest == classified(declared, "Framework :: Django")[-1]
    monkeypatch.setattr(django, "VERSION", (*NEWEST_DJANGO, 9, "final", 0))
    assert not [*check_django()]
    monkeypatch.setattr(django, "VERSION", (NEWEST_DJANGO[0], NEWEST_DJANGO[1] + 1, 0, "alpha", 1))
    [message] = check_django()
    assert message.id == "idempotency_django.W072"
    assert f"up to {newest}" in message.msg
