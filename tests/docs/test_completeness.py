"""The documentation speaks of everything there is, by the names that the code has for it."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from django.dispatch import Signal

import idempotency_django
from idempotency_django import checks, errors, signals
from idempotency_django.contrib.messaging.conf import conf
from idempotency_django.policy import FIELDS
from tests.docs.examples import ROOT

DOCS = ROOT / "docs"
PROBLEMS = (DOCS / "problems.md").read_text()
PACKAGE = Path(idempotency_django.__file__).parent


def the_errors(base: type[errors.IdempotencyError]) -> list[type[errors.IdempotencyError]]:
    """The errors that are raised: those without subclasses."""
    below = [found for subclass in base.__subclasses__() for found in the_errors(subclass)]
    return below or [base]


def described() -> ModuleType:
    """What the documentation's build makes its list of policy fields with."""
    spec = importlib.util.spec_from_file_location("described", DOCS / "_ext" / "described.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "error", the_errors(errors.IdempotencyError), ids=lambda error: error.__name__
)
def test_problem(error: type[errors.IdempotencyError]) -> None:
    """The type of each problem leads to its section, which begins with its title."""
    assert f"\n## {error.slug}\n\n*{error.title}.* " in PROBLEMS
    assert re.search(
        rf"^\| \[`{error.slug}`\]\S+(,[a-z ]+)? \| {error.status} \|", PROBLEMS, re.MULTILINE
    )


def test_every_problem_has_an_error() -> None:
    """There is no section for a problem that nothing raises."""
    sections = re.findall(r"^## (.+)$", PROBLEMS, re.MULTILINE)
    assert {*sections} == {error.slug for error in the_errors(errors.IdempotencyError)}
    assert len(sections) == len({*sections})


def test_settings() -> None:
    """Each setting has its section, and each section its setting."""
    page = (DOCS / "reference" / "settings.md").read_text()
    assert set(re.findall(r"^### ([A-Z_]+)$", page, re.MULTILINE)) == conf.names()


def test_policy_fields() -> None:
    """Each field of a policy is described where it is declared."""
    texts = dict(described().described_fields())
    assert list(texts) == [*FIELDS]
    assert all(texts.values())


def test_policy_defaults() -> None:
    """Each default is shown as a user would write it."""
    shown = described().shown
    defaults = {name: shown(field.metadata["default"]) for name, field in FIELDS.items()}
    assert defaults["mode"] == "'auto'"
    assert not [each for each in defaults.values() if len(each) > 40 or "<" in each]


def test_policy_groups() -> None:
    """The reference has each field once, in the order of the code."""
    page = (DOCS / "reference" / "settings.md").read_text()
    groups = re.findall(r"^\.\. policy-fields:: (.+)$", page, re.MULTILINE)
    assert " ".join(groups).split() == [*FIELDS]


def test_checks() -> None:
    """Each system check is in the table of checks."""
    table = checks.__doc__ or ""
    sources = "".join(path.read_text() for path in PACKAGE.rglob("*.py")).replace(table, "")
    used = set(re.findall(r"idempotency_django\.[EW]\d{3}", sources))
    assert set(re.findall(r"idempotency_django\.[EW]\d{3}", table)) == used


def test_checks_page() -> None:
    """Each check has a section of its own, with an anchor, the cause, an example and the fix."""
    ids = re.findall(r"idempotency_django\.([EW]\d{3})", checks.__doc__ or "")
    page = (DOCS / "reference" / "settings.md").read_text().partition("\n## System checks\n")[2]
    section = r"^\((\w+)\)=\n### (\w+): .+\n\nCause\n: .+\n\nExample\n: .+\n\nFix\n: .+$"
    sections = re.findall(section, page, re.MULTILINE)
    assert sorted(sections) == sorted((each.lower(), each) for each in ids)
    assert page.count("\n### ") == len(sections)


def test_signals() -> None:
    """Each signal is in the table of signals."""
    declared = {name for name, value in vars(signals).items() if isinstance(value, Signal)}
    assert set(re.findall(r"^``(\w+)``", signals.__doc__ or "", re.MULTILINE)) == declared


def test_extras() -> None:
    """Each extra has a row, and each row is an extra."""
    page = (DOCS / "tutorial.md").read_text()
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    rows = re.findall(r"^\| ([a-z]+) \|", page, re.MULTILINE)
    assert sorted(rows) == sorted(declared["optional-dependencies"])


def test_changelog() -> None:
    """The newest version in the changelog is the package's."""
    newest = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert newest == idempotency_django.__version__.partition(".dev")[0]
