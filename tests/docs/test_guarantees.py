"""Each promise of the documentation has a test that would fail if it were not kept."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from functools import reduce

import pytest

from tests.docs.examples import ROOT

TABLE = ROOT / "tests" / "GUARANTEES.md"
PROMISES = re.compile(r"\b(never|always|exactly once|at most once|at least once)\b", re.IGNORECASE)
ABOUT_OTHERS = {ROOT / "docs" / "how-to" / name for name in ("clients.md", "migrate.md")}
PAGES = [
    str(path.relative_to(ROOT))
    for path in sorted(
        {
            ROOT / "README.md",
            *(ROOT / "docs" / "explanation").glob("*.md"),
            *(ROOT / "docs" / "how-to").glob("*.md"),
        }
        - ABOUT_OTHERS
    )
]
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


def is_a_test(name: str) -> bool:
    """Whether there is a test of this id, inherited ones included."""
    path, *names = re.sub(r"\[.*\]$", "", name).split("::")
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    return names[-1].startswith("test_") and bool(
        reduce(lambda found, part: getattr(found, part, None), names, module)
    )


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
