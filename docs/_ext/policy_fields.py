"""The directive ``policy-fields``: some policy fields with defaults, made from the code."""

# ruff: noqa: INP001  # a folder on Sphinx's path, no package

from __future__ import annotations

from described import described_fields, shown
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.parsing import nested_parse_to_nodes

from idempotency_django.policy import FIELDS


class PolicyFields(SphinxDirective):
    """A definition list: the field, its default and what it decides."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        texts = dict(described_fields())
        lines: list[str] = []
        for name in self.arguments[0].split():
            default = shown(FIELDS[name].metadata["default"])
            lines += [f"``{name}`` = ``{default}``", f"    {texts[name]}", ""]
        return nested_parse_to_nodes(self.state, StringList(lines, "idempotency_django.policy"))


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("policy-fields", PolicyFields)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
