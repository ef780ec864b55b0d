"""The directive ``sequence``: a sequence diagram, from text as :mod:`drawn` takes it."""

# ruff: noqa: INP001  # a folder on Sphinx's path, no package

from __future__ import annotations

from docutils import nodes
from drawn import drawing
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class Sequence(SphinxDirective):
    """The diagram in HTML, its text elsewhere."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        source = "\n".join(self.content)
        try:
            svg = drawing(source)
        except ValueError as error:
            raise self.error(str(error)) from error
        if self.env.app.builder.format == "html":
            return [nodes.raw("", f'<div class="sequence">{svg}</div>', format="html")]
        return [nodes.literal_block(source, source)]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("sequence", Sequence)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
