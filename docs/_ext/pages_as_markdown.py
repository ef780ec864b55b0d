"""A page's source as plain Markdown: without what readers do not see, and without MyST.

Code stays as it is. What only Sphinx can build, such as the reference of the API, is taken from
the document that it has built.
"""

# ruff: noqa: INP001  # a folder on Sphinx's path, no package

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path

from docutils import nodes
from example_project import NAME
from plain_markdown import blocks

PUBLISHED = "https://idempotency-django.readthedocs.io/"
SKILL = "skill"
SKILL_LINK = re.compile(rf"\b{SKILL}\.md$")

INCLUDE = re.compile(r"^```\{include\} (\S+)\n((?::.*\n)*)```$", re.MULTILINE)
FRONT = re.compile(r"\A---\n(.*?)^---\n+", re.MULTILINE | re.DOTALL)
PARTS = re.compile(
    r"^(?P<unseen>(?: +%[^\n]*\n)+|(?:%[^\n]*\n)+\n?|<!--.*?-->\n{0,2})"
    r"|^(?P<fence>(?P<margin>[ :]*)(?P<ticks>```+)(?P<info>[^`\n]*)\n"
    r"(?P<block>.*?)^ *(?P=ticks)$(?P<space>\n*))"
    r"|^:::+\{(?P<kind>\w+)\}(?P<title>[^\n]*)\n(?P<note>.*?)^:::+$"
    r"|^\((?P<label>[\w-]+)\)=\n+"
    r"|(?:\{(?P<role>[\w:-]+)\})?(?<!`)(?P<quotes>`+)(?!`)"
    r"(?P<code>(?:(?!\n\n).)+?)(?<!`)(?P=quotes)(?!`)",
    re.MULTILINE | re.DOTALL,
)
"""What is code or MyST's own. The rest of a page is Markdown already."""
BUILT = ("{eval-rst}", "{literalinclude}")
"""Directives that only Sphinx understands: their content comes from the built document."""
BEGIN, END = "Sphinx builds what follows", "Sphinx has built this"
LINK_OR_CODE = re.compile(
    r"^(?P<margin>[ :]*)(?P<ticks>```+)[^`\n]*\n.*?^ *(?P=ticks)$"
    r"|(?<!`)(?P<quotes>`+)(?!`)(?:(?!\n\n).)+?(?<!`)(?P=quotes)(?!`)"
    r"|\]\((?!\w+:)(?P<address>[^)#\s]*)(?P<anchor>#[^)\s]+)?\)",
    re.MULTILINE | re.DOTALL,
)
OPTIONS = re.compile(r"((?::[^\n]*\n)*)\n?(.*)", re.DOTALL)


def marked(source: str) -> str:
    """The source with comments around what Sphinx builds, which is found by them later."""
    return PARTS.sub(_marked, source)


def _marked(part: re.Match[str]) -> str:
    if not (part["info"] or "").startswith(BUILT):
        return part[0]
    return f"% {BEGIN}\n\n{part[0].rstrip()}\n\n% {END}\n\n"


def built(page: nodes.document) -> Iterator[str]:
    """What Sphinx has built, in plain Markdown and in its order."""
    for comment in page.findall(lambda node: _says(node, BEGIN)):
        siblings = comment.parent.children[comment.parent.index(comment) + 1 :]
        level = sum(isinstance(each, nodes.section) for each in _parents(comment)) + 1
        yield blocks(takewhile(lambda node: not _says(node, END), siblings), level)


def as_markdown(path: Path, page: nodes.document) -> str:
    """A page as a reader sees it, in plain Markdown."""
    text = INCLUDE.sub(lambda match: _included(path, *match.groups()), path.read_text())
    made = built(page)
    text = PARTS.sub(lambda part: _plain(part, made), FRONT.sub("", text))
    if list(made):
        raise ValueError(f"{path} has fewer directives than its document.")
    text = _with_links(text, lambda address, anchor: SKILL_LINK.sub("SKILL.md", address) + anchor)
    return text.strip() + "\n"


def _plain(part: re.Match[str], made: Iterator[str]) -> str:
    if part["unseen"]:
        return ""
    if part["label"]:
        return f'<a id="{part["label"]}"></a>\n\n'
    if part["kind"]:
        return _note(part["kind"], part["title"], part["note"])
    if part["fence"]:
        return _block(part, made)
    code = part["code"]
    if part["role"] == "example-project":
        return f"[{code}]({PUBLISHED}{NAME})"
    if part["role"]:
        return f"`{_title(part['role'], code)}`"
    return part[0]


def _title(role: str, text: str) -> str:
    """What a link to the API says: `title <target>`, `~shortened.Target` or a target."""
    title = re.sub(r"\s*<[^>]+>$", "", text)
    if title != text:
        return title
    name = title.rpartition(".")[2] if title.startswith("~") else title
    return f"{name}()" if role in ("func", "meth") and not name.endswith("()") else name


def _block(part: re.Match[str], made: Iterator[str]) -> str:
    if not part["info"].startswith("{"):
        return part[0]
    name, _, argument = part["info"].lstrip("{").partition("}")
    [(options, body)] = OPTIONS.findall(part["block"])[:1]
    given, argument = _given(options), argument.strip()
    match name:
        case "toctree" | "raw":
            return ""
        case "code-block" | "sequence":
            caption = f"{given['caption']}:\n\n" if "caption" in given else ""
            text = f"{caption}```{argument or 'text'}\n{body}```"
        case "image":
            text = f"![{given.get('alt', '')}]({argument})"
        case "eval-rst" | "literalinclude":
            text = next(made)
        case _:
            return _note(name, argument, body) + part["space"]
    return text + part["space"]


def _note(kind: str, title: str, text: str) -> str:
    """A box as a quotation."""
    [(_options, body)] = OPTIONS.findall(text)[:1]
    text = f"**{title.strip() or kind.capitalize()}**\n\n{body.strip()}"
    return "\n".join(f"> {line}".rstrip() for line in text.splitlines())


def _says(node: nodes.Node, text: str) -> bool:
    return isinstance(node, nodes.comment) and node.astext().strip() == text


def _parents(node: nodes.Node) -> Iterator[nodes.Node]:
    while node.parent is not None:
        node = node.parent
        yield node


def _given(options: str) -> dict[str, str]:
    return dict(re.findall(r"^:([\w-]+): (.+)$", options, re.MULTILINE))


def _included(path: Path, name: str, options: str) -> str:
    text = (path.parent / name).read_text()
    given = _given(options)
    if "start-after" in given:
        text = text.partition(given["start-after"])[2].partition(given["end-before"])[0]
    return text.replace("](docs/", "](") if "relative-docs" in given else text


def with_absolute_links(text: str, docname: str) -> str:
    """A page that is read away from the others."""

    def absolute(address: str, anchor: str) -> str:
        target = posixpath.join(posixpath.dirname(docname), address) if address else f"{docname}.md"
        return f"{PUBLISHED}{posixpath.normpath(target)}{anchor}"

    return _with_links(text, absolute)


def _with_links(text: str, changed: Callable[[str, str], str]) -> str:
    """A page with other relative links, of which none is in code."""

    def replaced(match: re.Match[str]) -> str:
        if match["address"] is None:
            return match[0]
        return f"]({changed(match['address'], match['anchor'] or '')})"

    return LINK_OR_CODE.sub(replaced, text)
