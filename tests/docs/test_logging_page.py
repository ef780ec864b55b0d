"""The page on logging names every message that the package can log, at its level."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import idempotency_django
from tests.docs.examples import ROOT

PACKAGE = Path(idempotency_django.__file__).parent
PAGE = ROOT / "docs" / "reference" / "logging.md"
LEVELS = {
    "debug": "Debug messages",
    "info": "Information",
    "warning": "Warnings",
    "error": "Errors",
    "exception": "Errors",
    "critical": "Errors",
}


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Each call of a method of ``logger`` in the package, with the method's name."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name("logger"), attr=method)):
                    yield method, node


def logged() -> set[tuple[str, str]]:
    """The section that a message belongs to, and the message as the code has it."""
    found = set()
    for method, call in calls():
        assert method in LEVELS, f"logger.{method}() at line {call.lineno} has a level of its own"
        message = ast.literal_eval(call.args[0])
        found.add((LEVELS[method], message))
    return found


def documented() -> set[tuple[str, str]]:
    """The section and the message of each entry of the page's lists of messages."""
    _, *sections = re.split(r"^## (.+)$", PAGE.read_text(), flags=re.MULTILINE)
    return {
        (heading, message)
        for heading, text in zip(sections[::2], sections[1::2], strict=True)
        if heading in LEVELS.values()
        for message in re.findall(r"^`([^`]+)`\n: \S", text, re.MULTILINE)
    }


def test_messages() -> None:
    """Each message of the package is on the page, at its level, and no other is."""
    assert documented() == logged()


def test_loggers() -> None:
    """There is one name to configure: the package's."""
    sources = [path.read_text() for path in PACKAGE.rglob("*.py")]
    names = {name for source in sources for name in re.findall(r"getLogger\((.*?)\)", source)}
    assert names == {'"idempotency_django"'}
