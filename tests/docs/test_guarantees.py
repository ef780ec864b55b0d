"""The page of guarantees is short, and each promise on it names tests that exist."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.docs.examples import ROOT
from tests.docs.promises import PROMISES
from tests.support.summary import untested

SUITE = ROOT / "idempotency_django" / "testing"  # what each store's tests inherit
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def defined(path: Path) -> dict[str, set[str]]:
    """The tests of a module by the class that they are in, ``""`` for none."""
    found: dict[str, set[str]] = {"": set()}
    for node in ast.parse(path.read_text()).body if path.is_file() else ():
        where = found.setdefault(node.name, set()) if isinstance(node, ast.ClassDef) else found[""]
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        where |= {each.name for each in inner if isinstance(each, FUNCTIONS)}
    return found


def inherited(path: Path) -> Iterator[str]:
    """The tests that a class of this module may have from the suite for stores."""
    if path.parent == ROOT / "tests" / "contract":
        for module in SUITE.rglob("*.py"):
            yield from set().union(*defined(module).values())


def exists(name: str) -> bool:
    """Whether there is a test with this id."""
    path, *within, test = name.split("::")
    tests = defined(ROOT / path).get("::".join(within))
    return (
        tests is not None and test.startswith("test_") and test in tests | {*inherited(ROOT / path)}
    )


def test_each_promise_has_tests() -> None:
    """No promise is without tests, and each of its tests exists."""
    assert PROMISES
    assert not [sentence for sentence, tests in PROMISES.items() if not tests]
    named = {name for tests in PROMISES.values() for name in tests}
    assert not {name for name in named if not exists(name)}


def test_short() -> None:
    """There are at most 80 promises: a new one may replace another."""
    assert len(PROMISES) <= 80


def test_summary_misses_promises() -> None:
    """``make test`` fails where a promise has no test that passed in it."""
    first, *others = PROMISES
    passed = {name for sentence in others for name in PROMISES[sentence]} - {*PROMISES[first]}
    assert first in untested(passed)
    assert untested({tests[0] for tests in PROMISES.values()}) == []
