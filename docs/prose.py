"""Checks the English of pages and of the package: ``python docs/prose.py [FILE …]``.

A page fails if its sentences have more than 16 words on average, if one has more than 28, if it
uses a word that ``vocabulary.toml`` replaces, or if proselint finds something in it. Code is left
out; an inline piece of code counts as one word. Tables are only searched for words, and so are the
docstrings and texts of the package.
"""

# ruff: noqa: INP001  # a script in a folder of documents

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token
from proselint.checks import __register__
from proselint.config import DEFAULT
from proselint.registry import CheckRegistry
from proselint.tools import LintFile

DOCS = Path(__file__).parent
ROOT = DOCS.parent
WRITTEN_BY_PROGRAMS = {DOCS / "benchmarks.md"}
AVERAGE, LONGEST = 16, 28
"""Words in a sentence."""

SENTENCES = re.compile(r"(?<=[.!?])[\"”)]?\s+")
WORD = re.compile(r"[\w'./%-]*\w[\w'./%-]*")
INSTEAD = {
    re.compile(pattern, re.IGNORECASE): advice
    for pattern, advice in tomllib.loads((DOCS / "vocabulary.toml").read_text())["instead"].items()
}
# Its typography is not ours: quotation marks and dots are typed as in code.
CONFIG = {**DEFAULT, "checks": {**DEFAULT["checks"], "typography": False}}


def files() -> list[Path]:
    """All pages that people write, and the package."""
    found = {
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "SECURITY.md",
        *DOCS.rglob("*.md"),
    }
    found -= WRITTEN_BY_PROGRAMS | {*(DOCS / "_build").rglob("*.md")}
    return sorted(found | {*(ROOT / "idempotency_django").rglob("*.py")})


def blocks(text: str) -> Iterator[tuple[int, str, bool]]:
    """The line, the text and whether it is a cell of a table, of each block of prose on a page."""
    text = re.sub(
        r"\A---\n.*?^---$",
        lambda front: "\n" * front[0].count("\n"),
        text,
        flags=re.DOTALL | re.MULTILINE,
    )
    text = re.sub(r"^ *(%|:::).*$", "", text, flags=re.MULTILINE)  # comments and fences of MyST
    in_table, line = False, 0
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        in_table = (in_table or token.type == "table_open") and token.type != "table_close"
        line = token.map[0] + 1 if token.map else line
        if token.type == "inline":
            yield line, plain(token), in_table


def plain(block: Token) -> str:
    """A block without its markup."""
    parts = []
    for number, child in enumerate(block.children or ()):
        match child.type:
            case "text":
                parts.append(re.sub(r"\{[\w:]+\}$", "", child.content))  # a role of MyST
            case "code_inline":
                parts.append(f"code{number}")
            case "softbreak" | "hardbreak":
                parts.append(" ")
    return "".join(parts)


def replaced_words(place: str, text: str) -> Iterator[str]:
    """The words of a text that the vocabulary replaces."""
    for pattern, advice in INSTEAD.items():
        for match in pattern.finditer(text):
            yield f"{place}: “{match[0]}”: {advice}"


def findings(file: Path) -> Iterator[str]:
    """The lines to change in a page or a module."""
    name = str(file.relative_to(ROOT) if file.is_relative_to(ROOT) else file)
    if file.suffix == ".py":
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from replaced_words(f"{name}:{node.lineno}", node.value)
    else:
        yield from findings_of_page(name, file.read_text())


def findings_of_page(name: str, page: str) -> Iterator[str]:
    """The lines to change in a page."""
    lengths = []
    for line, text, in_table in blocks(page):
        yield from replaced_words(f"{name}:{line}", text)
        for result in [] if in_table else LintFile(str(name), f"{text}\n").lint(CONFIG):
            yield f"{name}:{line}: {result.check_result.message}"
        for sentence in [] if in_table else SENTENCES.split(text):
            length = len(WORD.findall(sentence))
            if length > LONGEST:
                yield f"{name}:{line}: {length} words in one sentence: {sentence[:60]}…"
            if sentence.endswith((".", "!", "?", ":")):  # no heading, no item of a list
                lengths.append(length)
    if lengths and (average := sum(lengths) / len(lengths)) > AVERAGE:
        yield f"{name}: {average:.1f} words a sentence on average"


def main() -> int:
    """Print what is to be changed; the exit code is 1 if there is something."""
    CheckRegistry().register_many(__register__)
    chosen = [Path(name).resolve() for name in sys.argv[1:]] or files()
    found = [line for file in chosen for line in findings(file)]
    print("\n".join([*found, f"{len(chosen)} files, {len(found)} findings"]))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
