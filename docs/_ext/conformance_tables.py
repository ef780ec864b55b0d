"""The directives ``requirements`` and ``dialects``: tables of what the conformance runner tests."""

# ruff: noqa: INP001  # a folder on Sphinx's path, no package

from __future__ import annotations

from collections.abc import Callable, Iterable

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from idempotency_django.conformance.catalogue import dialects, requirements


def requirements_table() -> str:
    """In Markdown: a row for each requirement."""
    rows = []
    for each in requirements():
        only = f" (only {', '.join(each.dialects)})" if each.dialects else ""
        rows.append((each.id, each.level, each.text, f"{each.source}{only}"))
    return _table(("Id", "Level", "Requirement", "Source"), rows)


def dialects_table() -> str:
    """In Markdown: a row for each dialect."""
    titles = {"mismatch": "Another body", "in_progress": "Still running", "missing": "No key"}
    rows = []
    for each in dialects().values():
        statuses = (", ".join(map(str, each.statuses.get(name, []))) or "–" for name in titles)
        key = f"{each.key['in']} `{each.key['name']}`"
        marker = f"`{each.marker['header']}`" if each.marker else "–"
        rows.append((f"`{each.name}`", each.says, key, *statuses, marker))
    return _table(("Dialect", "Defined by", "Key", *titles.values(), "Replay"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "requirements": requirements_table,
    "dialects": dialects_table,
}


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


class Table(SphinxDirective):
    """The table that the directive is called after."""

    def run(self) -> list[nodes.Node]:
        parent = nodes.Element()
        lines = StringList(TABLES[self.name]().splitlines(), self.name)
        self.state.nested_parse(lines, self.content_offset, parent)
        return parent.children


def setup(app: Sphinx) -> dict[str, bool]:
    for name in TABLES:
        app.add_directive(name, Table)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
