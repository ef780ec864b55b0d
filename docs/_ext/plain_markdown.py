"""Parts of a document as plain Markdown: what directives and docstrings become."""

# ruff: noqa: INP001  # a folder on Sphinx's path, no package

from __future__ import annotations

import re
from collections.abc import Iterable
from textwrap import indent

from docutils import nodes
from sphinx import addnodes

MARKUP = re.compile(r"[\\*`\[\]<]|(?<!\w)_|_(?!\w)")


def blocks(children: Iterable[nodes.Node], level: int) -> str:
    """Nodes below each other; definitions of the API get headings of this level."""
    return "\n\n".join(filter(None, (block(each, level) for each in children)))


def block(node: nodes.Node, level: int) -> str:
    """A node and its children."""
    match node:
        case nodes.literal_block():
            return fenced(node.astext(), node.get("language", "default"))
        case nodes.caption():
            return f"{inline(node)}:"
        case addnodes.desc_signature():
            return f"{'#' * min(level, 6)} {quoted(node.astext())}"
        case addnodes.desc():
            signatures = [each for each in node if isinstance(each, addnodes.desc_signature)]
            content = [each for each in node if isinstance(each, addnodes.desc_content)]
            return f"{blocks(signatures, level)}\n\n{blocks(content, level + 1)}".strip()
        case nodes.bullet_list() | nodes.enumerated_list():
            return "\n".join(item(blocks(each.children, level)) for each in node)
        case nodes.definition_list() | nodes.field_list():
            return "\n".join(item(f"{definition(each)}") for each in node)
        case nodes.table():
            return table(node)
        case addnodes.index() | nodes.target() | nodes.comment():
            return ""
        case nodes.paragraph() | nodes.term() | nodes.rubric():
            return inline(node)
        case nodes.Element():
            return blocks(node.children, level)
    raise TypeError(f"What is {node!r} in Markdown?")


def table(node: nodes.table) -> str:
    """Rows of cells that have no blocks."""
    rows = [[" ".join(blocks(cell, 6).split()) for cell in row] for row in node.findall(nodes.row)]
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def definition(node: nodes.Element) -> str:
    """A term, or the name of a field, and the text below it."""
    name, *rest = node.children
    text = blocks((child for each in rest for child in each), 6)
    return f"{inline(name)}:\n{text}" if text.startswith("- ") else f"{inline(name)}: {text}"


def item(text: str) -> str:
    return indent(text, "  ").replace("  ", "- ", 1)


def inline(node: nodes.Node) -> str:
    """The text of a paragraph or its like."""
    match node:
        case nodes.Text():
            return MARKUP.sub(r"\\\g<0>", re.sub(r"\n +", "\n", node.astext()))
        case nodes.literal():
            return quoted(node.astext())
        case nodes.strong():
            return f"**{inside(node)}**"
        case nodes.emphasis():
            return f"*{inside(node)}*"
        case nodes.reference(attributes={"refuri": address}) if "://" in address:
            return f"[{inside(node)}]({address})"
    return inside(node)


def inside(node: nodes.Element) -> str:
    return "".join(map(inline, node.children))


def quoted(code: str) -> str:
    """Inline code."""
    return f"`` {code} ``" if "`" in code else f"`{code}`"


def fenced(code: str, language: str) -> str:
    """A block of code."""
    longest = max(map(len, re.findall("`+", code)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language.replace('default', 'python')}\n{code}\n{fence}"
