"""Each promise of the documentation has a test that would fail if it were not kept."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.docs.examples import ROOT

TABLE = ROOT / "tests" / "GUARANTEES.md"
PROMISES = re.compile(r"\b(never|always|exactly once|at most once|at least once)\b", re.IGNORECASE)
ROOMS = ("requests", "effects", "messages", "operations", "background")
ABOUT_OTHERS = {ROOT / "docs" / name for name in ("requests/clients.md", "operations/migrate.md")}
PAGES = [
    str(path.relative_to(ROOT))
    for path in sorted(
        {
            ROOT / "README.md",
            ROOT / "docs" / "which-tool.md",
            *(path for room in ROOMS for path in (ROOT / "docs" / room).glob("*.md")),
        }
        - ABOUT_OTHERS
    )
]
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
BREAKS = r"\n\s*\n|\n(?=\| |- |\d+\. |: |#|:::)|(?<=[.:!?])\s+(?=[A-Z`*\[\"])"


def plain(text: str) -> str:
    """A text with its lines joined."""
    return " ".join(text.split())


def prose(page: str) -> str:
    """A page without its code, visible or not."""
    text = (ROOT / page).read_text()
    text = re.sub(r"^```.*?^```$", "\n\n", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^%[^\n]*$|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL)


def rows() -> Iterator[tuple[str, str, str]]:
    """The page, the sentence and the tests of each row of the table."""
    _, *sections = re.split(r"^## (.+)$", TABLE.read_text(), flags=re.MULTILINE)
    for page, text in zip(sections[::2], sections[1::2], strict=True):
        for sentence, tests in re.findall(r"^\| (.+) \| ([^|]+) \|$", text, re.MULTILINE):
            if not set(sentence) <= set("- |") and sentence != "Sentence":
                yield page, sentence.replace(r"\|", "|"), tests


ROWS = list(rows())


@cache
def defined(path: Path) -> dict[str, set[str]]:
    """The test functions of a module by the class they are in, ``""`` for none."""
    found: dict[str, set[str]] = {"": set()}
    for node in ast.parse(path.read_text()).body if path.is_file() else ():
        where = found.setdefault(node.name, set()) if isinstance(node, ast.ClassDef) else found[""]
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        where |= {each.name for each in inner if isinstance(each, FUNCTIONS)}
    return found


def contract() -> set[str]:
    """The tests that every store inherits."""
    modules = (ROOT / "idempotency_django" / "testing").glob("*.py")
    return {name for path in modules for tests in defined(path).values() for name in tests}


def is_a_test(name: str) -> bool:
    """Whether there is a test of this id."""
    path, *within, test = re.sub(r"\[.*\]$", "", name).split("::")
    tests = defined(ROOT / path).get("::".join(within))
    inherited = contract() if path.startswith("tests/contract/") else set()
    return tests is not None and test.startswith("test_") and test in tests | inherited


@pytest.mark.parametrize("page", sorted({page for page, _, _ in ROWS}))
def test_sentences(page: str) -> None:
    """Each sentence of the table is on its page."""
    text = plain((ROOT / page).read_text())
    missing = [
        sentence for where, sentence, _ in ROWS if where == page and plain(sentence) not in text
    ]
    assert not missing


def test_tests() -> None:
    """Each test of the table is there."""
    named = {name for _, _, tests in ROWS for name in re.findall(r"`([^`]+)`", tests)}
    assert named
    assert not {name for name in named if not is_a_test(name)}


def test_each_sentence_has_a_test() -> None:
    """No row is without a test."""
    assert not [row for row in ROWS if "`tests/" not in row[2]]


@pytest.mark.parametrize("page", PAGES)
def test_complete(page: str) -> None:
    """What is promised in absolute words is in the table, whole or in part."""
    covered = [plain(sentence) for where, sentence, _ in ROWS if where == page]
    promises = [plain(part) for part in re.split(BREAKS, prose(page)) if PROMISES.search(part)]
    assert not [
        promise
        for promise in promises
        if not any(sentence in promise or promise in sentence for sentence in covered)
    ]
