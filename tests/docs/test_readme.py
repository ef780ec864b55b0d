"""The README's links work in the repository, on the website and in the package's description."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache

from tests.docs.examples import ROOT

WEBSITE = "https://idempotency-django.readthedocs.io/"


def targets(text: str) -> list[str]:
    """Where the links of a text in Markdown lead to, without sections."""
    return [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text)]


@cache
def description() -> str:
    """What the wheel has for its description."""
    command = [sys.executable, "-m", "hatchling", "metadata", "readme"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def test_links_in_the_repository() -> None:
    """Each link is relative, and leads to a file."""
    links = targets((ROOT / "README.md").read_text())
    assert links
    assert not [link for link in links if not (ROOT / link).is_file()]


def test_links_of_the_description() -> None:
    """Each link is absolute, and leads to a page or a picture of the website."""
    links = targets(description())
    assert len(links) == len(targets((ROOT / "README.md").read_text()))
    assert not [link for link in links if not link.startswith(WEBSITE)]
    pages = [link.removeprefix(WEBSITE) or "index" for link in links]
    files = [page if page.startswith("_static/") else f"{page}.md" for page in pages]
    assert not [file for file in files if not (ROOT / "docs" / file).is_file()]


def test_description() -> None:
    """It has the README's headings and none of its comments."""
    headings = re.compile(r"^\n(## .+)\n$", re.MULTILINE)
    written = re.sub("<!--.*-->", "", (ROOT / "README.md").read_text())
    assert headings.findall(description()) == headings.findall(written) != []
    assert "<!--" not in description()
