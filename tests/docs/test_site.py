"""The built website: `make docs` builds it and runs this."""

from __future__ import annotations

import os
import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.docs.test_readme import WEBSITE, description

SITE = Path(os.environ.get("DOCS_SITE", ""))

pytestmark = pytest.mark.skipif(
    "DOCS_SITE" not in os.environ, reason="`make docs` builds the website and runs this"
)


class Html(HTMLParser):
    """The links and the anchors of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value:
                self.links.add(value)


@cache
def html(path: Path) -> Html:
    """A page of the site."""
    return Html(path.read_text())


def is_there(link: str, origin: Path) -> bool:
    """Whether a link leads to a file of the site, and to an anchor in it."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return True
    path = (origin.parent / unquote(parts.path)).resolve() if parts.path else origin
    path = path / "index.html" if path.is_dir() else path
    if not path.is_file():
        return False
    in_page = parts.fragment and path.suffix == ".html"
    return not in_page or unquote(parts.fragment) in html(path).anchors


def test_links() -> None:
    """Each link within the site leads to a page and an anchor."""
    pages = [path.resolve() for path in SITE.rglob("*.html") if "_modules" not in path.parts]
    assert len(pages) > 20
    broken = [
        f"{path.name}: {link}"
        for path in pages
        for link in sorted(html(path).links)
        if not is_there(link, path)
    ]
    assert not broken


def test_links_of_the_description() -> None:
    """Each link of the package's description leads to a page of the site, and to its anchor."""
    for link in re.findall(rf"\]\({WEBSITE}([^)]*)\)", description()):
        page, mark, anchor = link.partition("#")
        file = page if page.startswith("_static/") else f"{page or 'index'}.html"
        assert is_there(f"{file}{mark}{anchor}", (SITE / "x").resolve()), link
