"""What programs read: each page as Markdown, ``llms.txt``, ``llms-full.txt`` and ``SKILL.md``.

They are made of the pages' sources, without what readers do not see either. See llmstxt.org.
"""

# ruff: noqa: INP001  # a folder on Sphinx's path, no package

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from conformance_tables import TABLES
from described import described_fields, shown
from docutils import nodes
from example_project import NAME
from sphinx import addnodes
from sphinx.application import Sphinx

from idempotency_django.policy import FIELDS

PUBLISHED = "https://idempotency-django.readthedocs.io/"
SKILL = "skill"
OUTSIDE = ("operations/scaling", "shop")
"""Pages that are in no table of contents, and that programs may read."""

INCLUDE = re.compile(r"^```\{include\} (\S+)\n((?::.*\n)*)```$", re.MULTILINE)
UNSEEN = re.compile(
    r"\A---\n.*?^---\n"  # front matter
    r"|^(?:%[^\n]*\n)+\n?"
    r"|^<!--.*?-->\n{0,2}"
    r"|^```\{(?:toctree|raw)\}.*?^```\n+",
    re.MULTILINE | re.DOTALL,
)
LITERAL = re.compile(r"^```\{literalinclude\} (\S+)\n(?::.*\n)*```$", re.MULTILINE)
FIELD_LIST = re.compile(r"^```\{eval-rst\}\n\.\. policy-fields:: (.+)\n```$", re.MULTILINE)
TABLE = re.compile(rf"^```\{{({'|'.join(TABLES)})\}}\n```$", re.MULTILINE)
FRONT = re.compile(r"\A---\n(.*?)^---\n", re.MULTILINE | re.DOTALL)


def as_markdown(path: Path) -> str:
    """A page as a reader sees it, in plain Markdown."""
    text = INCLUDE.sub(lambda match: _included(path, *match.groups()), path.read_text())
    text = LITERAL.sub(lambda match: _file(path.parent / match[1]), text)
    text = FIELD_LIST.sub(lambda match: "\n".join(_fields(match[1].split())), text)
    text = TABLE.sub(lambda match: TABLES[match[1]](), text)
    text = UNSEEN.sub("", text)
    text = re.sub(r"^```\{code-block\} (\w+)$", r"```\1", text, flags=re.MULTILINE)
    text = re.sub(r"^```\{sequence\}$", "```text", text, flags=re.MULTILINE)
    text = re.sub(r"\{example-project\}`([^`]+)`", rf"[\1]({PUBLISHED}{NAME})", text)
    text = re.sub(r"\{[\w:]+\}`~?([^`]+)`", r"`\1`", text)  # a role
    return text.strip() + "\n"


def _fields(names: list[str]) -> Iterator[str]:
    texts = dict(described_fields())
    for name in names:
        text = re.sub(r":[\w:]+:`~?([^`]+)`", r"`\1`", texts[name]).replace("``", "`")
        yield f"- `{name}` = `{shown(FIELDS[name].metadata['default'])}`: {text}"


def _file(path: Path) -> str:
    return f"```{path.suffix.lstrip('.').replace('py', 'python')}\n{path.read_text()}```"


def _included(path: Path, name: str, options: str) -> str:
    text = (path.parent / name).read_text()
    given = dict(re.findall(r"^:([\w-]+): (.+)$", options, re.MULTILINE))
    if "start-after" in given:
        text = text.partition(given["start-after"])[2].partition(given["end-before"])[0]
    return text.replace("](docs/", "](") if "relative-docs" in given else text


def with_absolute_links(text: str, docname: str) -> str:
    """A page that is read away from the others."""

    def absolute(match: re.Match[str]) -> str:
        page = posixpath.normpath(posixpath.join(posixpath.dirname(docname), match[1]))
        return f"]({PUBLISHED}{page}.md{match[2] or ''})"

    return re.sub(r"\]\((?!\w+:)([^)#]+)\.md(#[^)]+)?\)", absolute, text)


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
    pages = {name: as_markdown(source / f"{name}.md") for name in sorted(app.env.found_docs)}
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
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
