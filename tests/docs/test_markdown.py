"""The pages as Markdown on the built website: `make docs` builds it and runs this."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from pydoc import locate
from urllib.parse import urlsplit

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from tests.docs.examples import ROOT
from tests.docs.test_readme import WEBSITE

SITE = Path(os.environ.get("DOCS_SITE", ""))
PAGES = sorted(
    path.relative_to(SITE).as_posix()
    for path in (SITE.rglob("*.md") if "DOCS_SITE" in os.environ else ())
)
FULL = "llms-full.txt"
SKILL = "SKILL.md"

pytestmark = pytest.mark.skipif(
    "DOCS_SITE" not in os.environ, reason="`make docs` builds the website and runs this"
)


class Code(HTMLParser):
    """The code that a page shows, in its order: blocks, inline code and signatures of the API."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.blocks: list[str] = []
        self.spans: list[str] = []
        self._article = 0
        self._inside = ""  # the tag whose text is read
        self._text = ""
        self._left_out = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        classes = (dict(attrs).get("class") or "").split()
        if tag == "article":
            self._article += 1
        elif self._inside:
            self._left_out += tag == "a" and "headerlink" in classes
        elif self._article and (tag in ("pre", "code") or (tag == "dt" and "sig" in classes)):
            self._inside, self._text = tag, ""

    def handle_endtag(self, tag: str) -> None:
        if tag == "article":
            self._article -= 1
        elif self._left_out and tag == "a":
            self._left_out -= 1
        elif tag == self._inside:
            (self.blocks if tag == "pre" else self.spans).append(self._text.strip())
            self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside and not self._left_out:
            self._text += "->" if data == "→" else data


def tokens(text: str) -> Iterator[Token]:
    """All tokens of a page in Markdown, inline ones included."""
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        yield token
        yield from token.children or ()


def code_of(text: str) -> tuple[list[str], list[str]]:
    """The blocks and the inline code of a page in Markdown; no diagrams, which HTML draws."""
    found = list(tokens(text))
    blocks = [each.content.strip() for each in found if each.type in ("fence", "code_block")]
    spans = [each.content.strip() for each in found if each.type == "code_inline"]
    return [each for each in blocks if not each.startswith("actors: ")], spans


def one_line(spans: list[str]) -> list[str]:
    return [" ".join(span.split()) for span in spans]


def html_of(page: str) -> str:
    return (SITE / page.replace(SKILL, "skill.md")).with_suffix(".html").read_text()


def links(text: str) -> list[str]:
    """What a page in Markdown links to, and the images that it shows."""
    found = [each.attrs.get("href") or each.attrs.get("src") for each in tokens(text)]
    return [str(link) for link in found if link]


def prose(text: str) -> str:
    """A page in Markdown without its code."""
    text = re.sub(r"^[ :]*(```+).*?^ *\1$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "``", text, flags=re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_same_code(page: str) -> None:
    """Each block and each inline piece of code is the same as in HTML."""
    shown = Code(html_of(page))
    blocks, spans = code_of((SITE / page).read_text())
    assert [block.replace("<BLANKLINE>", "") for block in blocks] == shown.blocks
    assert one_line(spans) == one_line(shown.spans)


@cache
def anchors(path: Path) -> set[str]:
    """What a link to a page in Markdown may name: its headings, as GitHub does, and its anchors."""
    text = path.read_text()
    found = set(re.findall(r'^<a id="([^"]+)"></a>$', text, re.MULTILINE))
    for opening, title in pairwise(MarkdownIt("commonmark").parse(text)):
        if opening.type == "heading_open":
            words_only = re.sub(r"[^\w\- ]", "", title.content.lower())
            found.add(words_only.replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES)
def test_links(page: str) -> None:
    """Each relative link leads to a file, one to a page to its Markdown, and to an anchor in it."""
    origin = (SITE / page).resolve()
    for link in links(origin.read_text()):
        parts = urlsplit(link)
        target = (origin.parent / parts.path).resolve() if parts.path else origin
        if not parts.scheme:
            assert target.is_file(), link
            assert target.suffix != ".html", link
            assert not parts.fragment or parts.fragment in anchors(target), link


@pytest.mark.parametrize("page", [*PAGES, FULL])
def test_plain(page: str) -> None:
    """No page has what only MyST understands, nor what readers do not see."""
    text = (SITE / page).read_text()
    assert not [each.info for each in tokens(text) if each.info.startswith("{")]
    left = r"^:::|^\([\w-]+\)=|^ *%|\{[\w:-]+\}``|^(?:orphan|myst): |<!--(?! https:)"
    assert not re.findall(left, prose(text), re.MULTILINE)


def test_all_pages() -> None:
    """Each page in HTML is there in Markdown."""
    made = {"genindex.md", "py-modindex.md", "search.md"}
    names = {path.relative_to(SITE).with_suffix(".md").as_posix() for path in SITE.rglob("*.html")}
    pages = {name for name in names - made if not name.startswith("_")}
    assert pages - {"skill.md"} == set(PAGES) - {SKILL}


def test_full() -> None:
    """The file of all pages has each page as it is, but for its links."""
    full = (SITE / FULL).read_text()
    for address, text in re.findall(
        rf"^<!-- {WEBSITE}(\S*) -->\n\n(.*?)(?=^<!-- |\Z)", full, re.MULTILINE | re.DOTALL
    ):
        page = (SITE / f"{address or 'index'}.md").read_text()
        assert code_of(text) == code_of(page)
        for link in links(text):
            path = urlsplit(link.removeprefix(WEBSITE)).path
            assert not link.startswith(WEBSITE) or (SITE / path).is_file(), link
            assert urlsplit(link).scheme, link


def test_api() -> None:
    """The reference has the first sentence of each documented name."""
    source = (ROOT / "docs" / "reference" / "api.md").read_text()
    names = re.findall(
        r"^\.\. auto(?:class|exception|function|method):: ([\w.]+)", source, re.MULTILINE
    )
    assert len(names) > 100
    text = words((SITE / "reference" / "api.md").read_text())
    for name in names:
        summary = (inspect.getdoc(locate(name)) or "").partition("\n\n")[0]
        assert words(summary) in text, name


def test_no_text_is_taken_for_a_type() -> None:
    """No docstring has its first half shown as a type, because a colon comes after it."""
    text = (SITE / "reference" / "api.md").read_text()
    assert not re.findall(r"^- (?:Return type|Type): .*", text, re.MULTILINE)


def words(text: str) -> str:
    """A text without its markup and its punctuation."""
    text = re.sub(r":[\w:]+:`(?:~[\w.]*\.)?([^`]+)`", r"\1", text)
    return " ".join(re.findall(r"\w+", text))
