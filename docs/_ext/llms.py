"""What programs read: each page as Markdown, ``llms.txt``, ``llms-full.txt`` and ``SKILL.md``.

They are made of the pages' sources, without what readers do not see either. See llmstxt.org.
"""

# ruff: noqa: INP001  # a folder on Sphinx's path, no package

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from docutils import nodes
from pages_as_markdown import FRONT, PUBLISHED, SKILL, as_markdown, marked, with_absolute_links
from sphinx import addnodes
from sphinx.application import Sphinx

OUTSIDE = ("operations/scaling", "shop")
"""Pages that are in no table of contents, and that programs may read."""


def mark(_app: Sphinx, _docname: str, content: list[str]) -> None:
    """Mark what Sphinx builds."""
    content[0] = marked(content[0])


def rooms(app: Sphinx) -> Iterator[tuple[str, list[str]]]:
    """The captions of the sidebar, each with the pages below it, those of pages included."""
    index = app.env.get_doctree("index")
    for tree in index.findall(addnodes.toctree):
        yield tree["caption"], [page for name in tree["includefiles"] for page in below(app, name)]


def below(app: Sphinx, docname: str) -> Iterator[str]:
    """A page and the pages of its own table of contents."""
    yield docname
    for name in app.env.toctree_includes.get(docname, ()):
        yield from below(app, name)


def description(app: Sphinx, docname: str) -> str:
    """What a page offers: its own description, or else its first sentence."""
    page = app.env.get_doctree(docname)
    for meta in page.findall(nodes.meta):
        if meta.get("name") == "description":
            return str(meta["content"])
    for paragraph in page.findall(nodes.paragraph):
        text = " ".join(paragraph.astext().split())
        return re.split(r"(?<=[.!?:]) ", text)[0].rstrip(":")
    return ""


def write(app: Sphinx, exception: Exception | None) -> None:
    """Write them beside the pages."""
    if exception or app.builder.format != "html":
        return
    source, site = Path(app.srcdir), Path(app.outdir)
    pages = {
        name: as_markdown(source / f"{name}.md", app.env.get_doctree(name))
        for name in sorted(app.env.found_docs)
    }
    skill = pages.pop(SKILL)
    [front] = FRONT.findall((source / f"{SKILL}.md").read_text())
    front = front.replace("orphan: true\n", "")
    (site / "SKILL.md").write_text(f"---\n{front}---\n\n{with_absolute_links(skill, SKILL)}")
    for name, text in pages.items():
        (site / f"{name}.md").write_text(text)
    lines = [f"# {app.config.project}", "", f"> {' '.join(_summary(pages['index']).split())}", ""]
    full = [f"<!-- {PUBLISHED} -->\n\n{with_absolute_links(pages['index'], 'index')}"]
    for caption, names in rooms(app):
        lines += [f"## {caption}", "", *(_link(app, name) for name in names), ""]
        full += [
            f"<!-- {PUBLISHED}{name} -->\n\n{with_absolute_links(pages[name], name)}"
            for name in names
        ]
    full += [
        f"<!-- {PUBLISHED}{name} -->\n\n{with_absolute_links(pages[name], name)}"
        for name in OUTSIDE
    ]
    lines += ["## Optional", ""]
    lines += [f"- [All pages in one file]({PUBLISHED}llms-full.txt)"]
    lines += [f"- [A skill for coding agents]({PUBLISHED}SKILL.md): how to add it to a project."]
    lines += [_link(app, name) for name in (*OUTSIDE, "changelog", "contributing")]
    (site / "llms.txt").write_text("\n".join(lines) + "\n")
    (site / "llms-full.txt").write_text("\n".join(full))


def _summary(index: str) -> str:
    return index.split("\n\n")[1].replace("**", "")


def _link(app: Sphinx, name: str) -> str:
    title = app.env.titles[name].astext()
    return f"- [{title}]({PUBLISHED}{name}.md): {description(app, name)}"


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", mark)
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
