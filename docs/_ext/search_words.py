"""Adds the words of ``search.toml`` to the search index, below the title of their page."""

# ruff: noqa: INP001  # a folder on Sphinx's path, no package

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path

from sphinx.application import Sphinx

WORDS = Path(__file__).parents[1] / "search.toml"
TITLE = re.compile(r"^# .+$", re.MULTILINE)


@cache
def words() -> dict[str, list[str]]:
    """The words of each page."""
    found = tomllib.loads(WORDS.read_text())
    return found["pages"]  # type: ignore[no-any-return]


def add(app: Sphinx, docname: str, content: list[str]) -> None:
    """Write an index entry for each word; ``!`` makes it one of the first hits."""
    if docname in words():
        app.env.note_dependency(str(WORDS))
        entries = "".join(f"   ! single: {word}\n" for word in words()[docname])
        block = f"\n\n```{{eval-rst}}\n.. index::\n{entries}```\n"
        content[0] = TITLE.sub(lambda title: title[0] + block, content[0], count=1)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", add)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
